"""How many ranges are in flight: grows while that makes the whole faster, halves when the store says "slow down"."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class InFlight:
    """A gate with a moving limit, at most `most`.

    One look per `window` finished ranges (at least as many as are in flight): if the rate rose by more than
    5 % since the limit was last raised, raise it by half; if it did not, step back to the limit that gave the
    best rate and stay, trying one step more from time to time. `throttled` halves it at once.
    """

    GAIN = 1.05
    PATIENCE = 4  # windows between trials once the rate no longer grows

    def __init__(self, most: int, start: int = 4, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.limit = most, max(1, min(start, most))
        self.active = self.peak = 0
        self._clock = clock
        self._gate = threading.Condition()
        self._best_rate, self._best_limit, self._rest = 0.0, self.limit, 0
        self._bytes, self._done, self._since = 0, 0, clock()

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
            self._gate.notify()

    def throttled(self) -> None:
        with self._gate:
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
            self.limit = min(self.most, self.limit + max(1, self.limit // 2))
        else:
            self.limit, self._rest = self._best_limit, self.PATIENCE
            self._best_rate = max(rate, self._best_rate * 0.9)  # forget slowly: links change
        self._start_window()
        self._gate.notify_all()

    def _start_window(self) -> None:
        self._bytes, self._done, self._since = 0, 0, self._clock()
