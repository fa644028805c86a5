"""How many ranges are in flight: grows while that makes the whole faster, halves when the store says "slow down"."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class InFlight:
    """A gate with a moving limit, at most `most`.

    One look per window of finished ranges (at least as many as are in flight): if the rate rose by more than
    5 % since the limit was last raised, raise it by half; if it did not, step back to the limit that gave the
    best rate, stay for some windows, then try the step once more. `slower` halves it at once.

    It starts with eight: a fast link is not left half empty while the rate is looked for, and a slow one that cannot
    carry eight ranges says so by a refusal or a late range, which halves it.
    """

    GAIN = 1.05
    PATIENCE = 4  # windows between trials once the rate no longer grows
    START = 8

    def __init__(self, most: int, start: int = START, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.limit = most, max(1, min(start, most))
        self.active = self.peak = 0
        self._moving = 0  # of those active, how many have a transfer under way: none of them waits for another
        self._clock = clock
        self._gate = threading.Condition()
        self._best_rate, self._best_limit, self._rest = 0.0, self.limit, 0
        self._bytes, self._done, self._since = 0, 0, clock()
        self._halved = float("-inf")

    def enter(self, stopped: Callable[[], bool]) -> bool:
        """Wait for a place; False when `stopped()` became true instead (looked at every 0.1 s)."""
        with self._gate:
            while self.active >= self.limit:
                if stopped():
                    return False
                self._gate.wait(0.1)
            self.active += 1
            self.peak = max(self.peak, self.active)
            return True

    def leave(self, nbytes: int) -> None:
        """One range is over; `nbytes` verified bytes came with it (0 = it failed)."""
        with self._gate:
            self.active -= 1
            self._bytes += nbytes
            self._done += 1
            if self._done >= max(4, self.limit):
                self._look()
            self._gate.notify_all()  # one that waits in `transfer` may not be able to use it

    @contextmanager
    def transfer(self, again: bool, stopped: Callable[[], bool]) -> Iterator[None]:
        """Around each try of a range that entered. Tries after the first begin only within the limit: ranges that were
        all late together must not all be sent again together."""
        with self._gate:
            while again and self._moving >= self.limit and not stopped():
                self._gate.wait(0.1)
            self._moving += 1
        try:
            yield
        finally:
            with self._gate:
                self._moving -= 1
                self._gate.notify_all()

    def slower(self, began: float | None = None) -> None:
        """The store said "slow down", or a range was late. `began`: of several that began before the same halving, one counts."""
        with self._gate:
            if began is not None and began < self._halved:
                return
            self._halved = self._clock()
            self.limit = max(1, self.limit // 2)
            self._best_limit, self._best_rate, self._rest = self.limit, 0.0, self.PATIENCE
            self._start_window()

    def _look(self) -> None:
        elapsed = self._clock() - self._since
        if elapsed <= 0:
            return
        rate = self._bytes / elapsed
        if self._rest > 0:
            self._rest -= 1
        elif rate > self._best_rate * self.GAIN:
            self._best_rate, self._best_limit = rate, self.limit
            self._raise()
        elif self.limit > self._best_limit:
            self.limit, self._rest = self._best_limit, self.PATIENCE
        else:
            self._best_rate = max(rate, self._best_rate * 0.9)  # forget slowly: links change
            self._raise()
        self._start_window()
        self._gate.notify_all()

    def _raise(self) -> None:
        self.limit = min(self.most, self.limit + max(1, self.limit // 2))

    def _start_window(self) -> None:
        self._bytes, self._done, self._since = 0, 0, self._clock()
