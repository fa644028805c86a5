"""What long registry operations tell while they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Bytes done of `total` in `phase`; `rate` in bytes per second since the phase began; `skipped` were there already."""

    phase: str
    done: int
    total: int
    rate: float
    skipped: int = 0


Report = Callable[[Progress], None]


class Meter:
    """Counts bytes from any thread and reports at most every `every_s` seconds, and at the end."""

    def __init__(self, phase: str, total: int, report: Report | None, every_s: float = 0.2) -> None:
        self.phase, self.total, self.every_s = phase, total, every_s
        self.done = self.skipped = 0
        self._report = report
        self._began = self._last = time.monotonic()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def add(self, n: int, *, skipped: bool = False) -> None:
        with self._lock:
            self.done += n
            self.skipped += n if skipped else 0
            now = time.monotonic()
            if now - self._last >= self.every_s:
                self._last = now
                self._tell()

    def finish(self) -> None:
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        if self._report:
            moved = self.done - self.skipped
            self._report(Progress(self.phase, self.done, self.total, moved / max(1e-6, self.seconds), self.skipped))
