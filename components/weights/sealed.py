"""Files that nobody can change any more, so that workers need not hash them again.

A file that is complete in the node cache is copied once into a memfd, which is then sealed (F_SEAL_WRITE, SHRINK,
GROW, SEAL: from then on the kernel refuses every change, whoever asks), and hashed in that state. Only what was
right is kept. Workers get the descriptor over a Unix socket (components.weights.handover).

Contract:

* A sealed file was hashed after it was sealed: what a worker maps is what was verified.
* Sealed files count against the cache's budget and only use what all files of the release leave free; they go first
  when room is needed. One that is mapped by a worker is pinned, for its memory lives as long as the mapping.
* They end with the service; the files on tmpfs stay and are sealed again by the next one once checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import threading
from collections.abc import Callable

from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.loading.fetch import Stopped, mismatch
from components.common.loading.mapped import SEALS
from components.common.loading.pages import HUGE, map_file, reserve
from components.common.loading.report import Report
from components.common.registry.manifest import FileEntry
from components.weights.cache import NodeCache
from components.weights.entry import Entry

log = logging.getLogger("dynamo_blob.weights")

_STEP = 16 * HUGE
_NICE = 10  # workers start meanwhile
_STOP_S = 2.0


class Sealer:
    """One thread that seals what the cache completes. Thread-safe."""

    def __init__(self, cache: NodeCache, report: Report, range_bytes: int) -> None:
        self.cache, self.report, self.range_bytes = cache, report, range_bytes
        self._jobs: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="seal", daemon=True)
        cache.completed = self._jobs.put
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._jobs.put(None)
        self._thread.join(_STOP_S)

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (entry := self._jobs.get()) is not None and not self._stop.is_set():
            sealed = self.cache.begin_sealing(entry.file)
            if sealed is None:
                continue
            fd = -1
            try:
                fd = seal(
                    entry.file, str(entry.path), self.range_bytes, lambda s=sealed: self._stop.is_set() or s.given_up
                )
                self.report.add("sealed_files")
            except Stopped:
                pass
            except DynamoBlobError as e:
                self.report.add("cache_altered")
                log.error("%s", e)
                self.cache.altered(entry)
            except OSError as e:
                log.warning("%s is not sealed: %s", entry.file.path, e.strerror)
            finally:
                self.cache.end_sealing(sealed, fd)


def seal(file: FileEntry, path: str, range_bytes: int, stopped: Callable[[], bool] = lambda: False) -> int:
    """A sealed memfd with the verified content of `path`. Raises OSError, WEIGHTS-DIGEST-MISMATCH, Stopped."""
    fd = os.memfd_create(f"weights-{file.blake3[:16]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, file.size)
        os.fchmod(fd, 0o400)
        _copy(fd, file, path, stopped)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        array = map_file(fd, file.size)
        for index, digest in enumerate(file.ranges):
            if stopped():
                raise Stopped
            begin = index * range_bytes
            view = array[begin : begin + range_bytes].data
            if (found := blake3(view).hexdigest()) != digest:
                raise mismatch(file.path, index, begin, begin + len(view), digest, found, path)
        return fd
    except BaseException:
        os.close(fd)
        raise


def _copy(fd: int, file: FileEntry, path: str, stopped: Callable[[], bool]) -> None:
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        array, at = map_file(fd, file.size), 0
        for begin in range(0, file.size, _STEP):
            if stopped():
                raise Stopped
            end = min(begin + _STEP, file.size)
            reserve(fd, array, begin, end)
            while at < end:
                done = os.sendfile(fd, source, at, end - at)
                if done <= 0:
                    raise OSError(0, "the file is shorter than it was", path)
                at += done
    finally:
        os.close(source)
