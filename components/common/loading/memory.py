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

    def __init__(self, spare_bytes: int, pin: Callable[[int, int], Callable[[], None]] | None = None) -> None:
        self._pin = pin  # called with address and size of each new mapping; what it returns is called before unmapping
        self._unpin: dict[int, Callable[[], None]] = {}
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
                best = min(reversed(fitting), key=len)  # of equal ones the last used: more of it is in a cache
                self._idle.remove(best)
                self.reused += 1
                return best
            self.mapped += 1
        # private: Python's default is shared memory, which takes no huge pages (1.1 instead of 0.2 CPU s per GB to touch)
        region = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                region.madvise(mmap.MADV_HUGEPAGE)
        if self._pin is not None:
            pages: np.ndarray[Any, Any] = np.frombuffer(region, dtype=np.uint8)
            pages[::4096] = 0  # touched pages register ten times faster than absent ones
            self._unpin[id(region)] = self._pin(int(pages.ctypes.data), len(region))
        return region

    def _back(self, region: mmap.mmap) -> None:
        with self._lock:
            if sum(map(len, self._idle)) + len(region) <= self._spare_bytes:
                self._idle.append(region)
                return
        self._drop(region)

    def _drop(self, region: mmap.mmap) -> None:
        """Memory still registered with a device must not be unmapped: the next mapping there could not be pinned."""
        unpin = self._unpin.pop(id(region), None)
        if unpin is not None:
            unpin()

    def clear(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._spare_bytes = 0
        for region in idle:
            self._drop(region)
