"""A circuit breaker: after `errors` failures in a row, nothing is tried until a probe succeeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """closed -> open (`errors` consecutive failures) -> a probe every `open_s`, doubling to `max_open_s` -> closed.

    Requests never pay for the probe: `due` tells a background loop when to make one.
    """

    def __init__(
        self,
        errors: int = 5,
        open_s: float = 1.0,
        max_open_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._open_s, self._max_open_s, self._clock = errors, open_s, max_open_s, clock
        self._lock = threading.Lock()
        self._errors, self._wait, self._until = 0, open_s, 0.0
        self._open = self._probing = False
        self.opened = 0

    @property
    def open(self) -> bool:
        return self._open

    def good(self) -> None:
        """Something succeeded. Only a probe closes an open breaker: answers still in flight prove nothing new."""
        with self._lock:
            if not self._open:
                self._errors = 0

    def bad(self) -> None:
        with self._lock:
            self._errors += 1
            if not self._open and self._errors >= self._limit:
                self._open, self._wait = True, self._open_s
                self._until = self._clock() + self._wait
                self.opened += 1

    def due(self) -> bool:
        """True once per waiting period while open: the caller probes and answers `probed`."""
        with self._lock:
            if not self._open or self._probing or self._clock() < self._until:
                return False
            self._probing = True
            return True

    def probed(self, success: bool) -> None:
        with self._lock:
            self._probing = False
            if success:
                self._open, self._errors, self._wait = False, 0, self._open_s
            else:
                self._wait = min(self._wait * 2, self._max_open_s)
                self._until = self._clock() + self._wait
