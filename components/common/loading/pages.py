"""Mappings of files in memory, aligned so that the kernel can map 2 MiB pages at once.

A page fault per 4 KiB costs as much as copying the page (0.13 of 0.17 CPU s per GB here). tmpfs and sealed
memory get huge pages nowhere by default (`shmem_enabled` is `never`), but MADV_COLLAPSE (Linux 6.1) makes them on
demand. All of it is an economy: where the kernel cannot, everything works with small pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np

HUGE = 2 * 2**20
_POPULATE_READ, _COLLAPSE = 22, 25
_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_file(fd: int, size: int, *, private: bool = False, shared: bool = False) -> np.ndarray[Any, Any]:
    """The first `size` bytes of `fd` as a uint8 array at a huge page's border: read-only, or private and writable
    (pages are shared until written), or shared and writable. Unmapped when nothing refers to the array. Raises OSError."""
    base = _map(None, size + HUGE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    at = -(-base // HUGE) * HUGE
    prot = mmap.PROT_READ | mmap.PROT_WRITE if private or shared else mmap.PROT_READ
    try:
        _map(at, size, prot, (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | _FIXED, fd)
    except OSError:
        _libc.munmap(base, size + HUGE)
        raise
    array: np.ndarray[Any, Any] = np.frombuffer(
        memoryview((ctypes.c_uint8 * size).from_address(at)).cast("B"), dtype=np.uint8
    )
    if not private and not shared:
        array.flags.writeable = False
    weakref.finalize(array, _libc.munmap, base, size + HUGE).atexit = False
    return array


def populate(view: memoryview) -> None:
    """Map the pages under `view` now, in one call and without the interpreter's lock, instead of one fault each."""
    if len(view):
        at = np.frombuffer(view, dtype=np.uint8).ctypes.data
        begin = at // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(begin, at + len(view) - begin, _POPULATE_READ)  # before Linux 5.14: faults, as ever


def collapse(array: np.ndarray[Any, Any], begin: int, end: int) -> bool:
    """Put whole huge pages under bytes [begin, end) of a mapped file, `begin` a multiple of HUGE; the content stays.

    False when the kernel does not (too old, memory in pieces, a page in use): nothing is lost then.
    """
    whole = (end - begin) // HUGE * HUGE
    return whole > 0 and _libc.madvise(array.ctypes.data + begin, whole, _COLLAPSE) == 0


def reserve(fd: int, array: np.ndarray[Any, Any], begin: int, end: int) -> bool:
    """Give bytes [begin, end) of `fd`, mapped as `array`, pages; what is written there stays. True if they are huge
    (but for the rest behind the last whole one). `begin` is a multiple of HUGE. Raises OSError when there is no room."""
    whole = (end - begin) // HUGE * HUGE
    for at in range(begin, begin + whole, HUGE):
        os.posix_fallocate(fd, at, mmap.PAGESIZE)  # of nothing at all the kernel makes no huge page
    # one call for all: each waits until every core has emptied its list of new pages, long on a busy machine
    huge = whole == 0 or collapse(array, begin, end)
    os.posix_fallocate(fd, begin, end - begin)
    return huge


def _map(address: int | None, size: int, prot: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, size, prot, flags, fd, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
