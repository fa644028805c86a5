"""Buffers for segments: reused only when nobody holds a tensor that lies in them.

A buffer is lent as a numpy array that exists for this loan alone. Every torch view keeps that array
alive; when the last one goes, the buffer returns to the pool. A consumer that keeps tensors keeps
their buffers: they then count as the consumer's memory, and the pool maps new ones.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

_HUGE = 2 * 2**20


class BufferPool:
    """`spare_bytes`: idle buffers kept for reuse. Mapping and returning are thread-safe."""

    def __init__(self, spare_bytes: int, pin: Callable[[int, int], None] | None = None) -> None:
        self._pin = pin  # called with address and size of each new mapping
        self._spare_bytes = spare_bytes
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        self.mapped = self.reused = 0

    def lend(self, nbytes: int) -> np.ndarray[Any, Any]:
        """A writable uint8 array of at least `nbytes`; content undefined. It returns by itself when unreferenced."""
        region = self._take(nbytes)
        loan: np.ndarray[Any, Any] = np.frombuffer(region, dtype=np.uint8)
        weakref.finalize(loan, self._back, region).atexit = False
        return loan

    def _take(self, nbytes: int) -> mmap.mmap:
        with self._lock:
            fitting = [r for r in self._idle if nbytes <= len(r) <= 2 * nbytes + _HUGE]
            if fitting:
                best = min(fitting, key=len)
                self._idle.remove(best)
                self.reused += 1
                return best
            self.mapped += 1
        region = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                region.madvise(mmap.MADV_HUGEPAGE)
        if self._pin is not None:
            self._pin(int(np.frombuffer(region, dtype=np.uint8).ctypes.data), len(region))
        return region

    def _back(self, region: mmap.mmap) -> None:
        with self._lock:
            if sum(map(len, self._idle)) + len(region) <= self._spare_bytes:
                self._idle.append(region)

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()
            self._spare_bytes = 0
