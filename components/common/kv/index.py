"""What the tier asks about existence. The retention catalogue (catalogue.py) is the real one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Protocol


class Index(Protocol):
    """Advice: stale in either direction costs a bounded miss, because every object proves itself at load."""

    def lookup(self, name: str) -> bool | None:
        """True: there. False: not there. None: not known, ask the store."""

    def note_put(self, name: str, nbytes: int, cls: str, seconds_saved: float, parent: str | None = None) -> None: ...

    def note_hit(self, name: str) -> None: ...

    def note_gone(self, name: str, reason: str) -> None: ...


class MemoryIndex:
    """Names seen by this process; bounded, oldest forgotten first. Knows nothing of absence."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()
        self._capacity = capacity
        self._lock = threading.Lock()

    def lookup(self, name: str) -> bool | None:
        return True if name in self._names else None

    def note_put(self, name: str, nbytes: int, cls: str, seconds_saved: float, parent: str | None = None) -> None:
        with self._lock:
            self._names[name] = None
            while len(self._names) > self._capacity:
                self._names.popitem(last=False)

    def note_hit(self, name: str) -> None:
        self.note_put(name, 0, "", 0.0)

    def note_gone(self, name: str, reason: str) -> None:
        with self._lock:
            self._names.pop(name, None)
