"""Staging memory: equal slots in one mapping that lives as long as the process.

NIXL has no cancel: a transfer whose handle was given up keeps writing. Hence slots are never
freed, and a slot whose transfer is overdue is quarantined: outside the pool until that very
transfer is over.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_FOREVER: list[Any] = []
_PAGE = 4096


class Slot:
    """One staging buffer: `view` (memoryview) and `array` (uint8) of `nbytes`, at `address`.

    `over`: called once, by the transport, when an overdue transfer of this slot has ended after all.
    """

    __slots__ = ("address", "array", "index", "nbytes", "over", "pool", "view")

    def __init__(self, pool: StagingPool, index: int, array: np.ndarray[Any, Any]) -> None:
        self.pool, self.index, self.array = pool, index, array
        self.view = memoryview(array)  # type: ignore[arg-type]
        self.address = int(array.ctypes.data)
        self.nbytes = int(array.nbytes)
        self.over: Callable[[], object] | None = None


class StagingPool:
    """`slots` buffers of `slot_bytes`. Its budget is slots x slot_bytes (rounded up to pages) and never grows."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        self.count = slots
        self._map = mmap.mmap(-1, self.slot_bytes * slots)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self.address, self.nbytes = int(whole.ctypes.data), int(whole.nbytes)
        self._slots = [Slot(self, i, whole[i * self.slot_bytes : (i + 1) * self.slot_bytes]) for i in range(slots)]
        self._free = list(self._slots)
        self._quarantined: set[int] = set()
        self._ready = threading.Condition()
        _FOREVER.append(self)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def used(self) -> int:
        """Slots in the hands of callers (neither free nor quarantined)."""
        return self.count - len(self._free) - len(self._quarantined)

    def acquire(self, timeout: float = 0.0, reserve: int = 0) -> Slot | None:
        """A slot, leaving at least `reserve` free ones behind; None when there is none within `timeout` seconds."""
        end = time.monotonic() + timeout
        with self._ready:
            while len(self._free) <= reserve:
                left = end - time.monotonic()
                if left <= 0 or not self._ready.wait(left):
                    return None
            return self._free.pop()

    def release(self, slot: Slot) -> None:
        with self._ready:
            if slot.index in self._quarantined or slot in self._free:
                raise ValueError(f"slot {slot.index} is not in use")
            self._free.append(slot)
            self._ready.notify()

    def quarantine(self, slot: Slot) -> None:
        """The transfer into or out of `slot` is overdue: nobody may use it until `cleared`."""
        with self._ready:
            self._quarantined.add(slot.index)

    def cleared(self, slot: Slot) -> None:
        """The overdue transfer is over: the slot is as good as any."""
        over, slot.over = slot.over, None
        if over is not None:
            over()
        with self._ready:
            self._quarantined.discard(slot.index)
            self._free.append(slot)
            self._ready.notify()

    def check_integrity(self) -> None:
        """Every slot is in exactly one place. For tests."""
        with self._ready:
            free = [s.index for s in self._free]
            assert len(free) == len(set(free)), f"slot twice in the pool: {sorted(free)}"
            assert not set(free) & self._quarantined, "a quarantined slot is in the pool"
