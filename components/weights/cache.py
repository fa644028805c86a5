"""Node cache: verified files of a release on tmpfs, shared by every worker of the node.

    <dir>/lock               held by the one service that writes here
    <dir>/objects/<blake3>   complete; mode 0444, owner other than the workers where we may choose it
    <dir>/partial/...        being filled; removed at start, so a kill -9 leaves nothing behind
    <dir>/manifests/<digest>.json

Contract:

* A range is announced only after its digest was checked and all of the file's pages exist. The service receives and
  checks in a buffer of its own, then copies into pages that are there (components.weights.entry). Workers check again
  in the memory they map.
* Files found at start, or whose stat changed since they were verified, count as unverified until hashed again.
* The sum of file sizes, sealed copies (components.weights.sealed) included, never exceeds the budget. Eviction is LRU
  over entries without leases, sealed copies first; a leased (mapped) or filling entry is pinned. A lease ends with its
  connection, so a dead worker pins nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from components.common.errors import DynamoBlobError
from components.common.loading.pages import map_file
from components.common.registry.manifest import FileEntry
from components.weights.entry import Entry, Sealed, Writer

log = logging.getLogger("dynamo_blob.weights")


class NodeCache:
    """Thread-safe. One instance owns `directory` (WEIGHTS-CACHE-TAKEN if another process does)."""

    def __init__(self, directory: Path, budget: int, *, uid: int = -1) -> None:
        self.directory, self.budget = directory, budget
        self._uid = uid
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._sealed: dict[str, Sealed] = {}
        self._release = 0  # bytes of all files that are to be kept
        self.completed: Callable[[Entry], None] = lambda _: None
        self.evicted = self.refused = self.stale = 0
        for name in ("objects", "partial", "manifests"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        self._owner = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._owner)
            raise DynamoBlobError(
                "WEIGHTS-CACHE-TAKEN",
                "another weight service owns the cache directory",
                where=str(directory),
                do="give each weight service its own directory",
            ) from None
        for left in (directory / "partial").iterdir():
            _remove(left)

    @property
    def used(self) -> int:
        with self._lock:
            return sum(e.file.size for e in self._held())

    def _held(self) -> list[Entry | Sealed]:
        return [*self._entries.values(), *self._sealed.values()]

    def adopt(self, files: Iterable[FileEntry]) -> None:
        """What lies in the directory: files of the release with the right size wait to be checked, others are removed."""
        wanted = {f.blake3: f for f in files}
        self._release = sum(f.size for f in wanted.values())
        with self._lock:
            for path in sorted((self.directory / "objects").iterdir(), key=lambda p: p.lstat().st_atime):
                file, info = wanted.get(path.name), path.lstat()
                if (
                    file is None
                    or not stat.S_ISREG(info.st_mode)
                    or not 0 < info.st_size == file.size
                    or self.used + file.size > self.budget
                ):
                    self.stale += 1
                    _remove(path)
                else:
                    self._entries[file.blake3] = Entry(file, path, path, _map(path, file.size), "checking")

    def keep_manifest(self, digest: str, data: bytes) -> None:
        """So that the pinned release can be served when neither registry nor service answers. On a full disk: without."""
        path = self.directory / "manifests" / f"{digest}.json"
        work = path.with_name(f".{digest}.{os.getpid()}")
        try:
            work.write_bytes(data)
            os.chmod(work, 0o444)
            os.replace(work, path)
        except OSError as e:
            log.warning("the manifest is not kept for outages: %s: %s", path, e.strerror)
            with contextlib.suppress(OSError):
                work.unlink()

    def lease(self, file: FileEntry) -> tuple[Entry, list[int]]:
        """The entry, pinned until `release`, and the ranges the caller must have filled or checked (empty if others do).

        Raises WEIGHTS-CACHE-FULL when there is no room that is not pinned.
        """
        with self._lock:
            entry = self._entries.get(file.blake3)
            if entry is not None and entry.state == "present" and _stat(entry.path) != entry.stat:
                self.stale += 1
                self._drop(entry)
                entry = None
            work: list[int] = []
            if entry is None:
                self._make_room(file)
                entry = self._create(file)
                work = list(range(len(file.ranges)))
            elif entry.state == "checking" and not entry.working:
                entry.working = True
                work = list(range(len(file.ranges)))
            if entry.state == "present" and file.blake3 not in self._sealed:
                self.completed(entry)  # there may be room by now
            entry.leases += 1
            entry.used = time.monotonic()
            return entry, work

    def has_room(self, file: FileEntry) -> bool:
        """A file that is not here would fit without evicting anything."""
        with self._lock:
            promised = sum(e.file.size for e in self._entries.values() if not e.reserved)
            fits = self.used + file.size <= self.budget and promised + file.size <= _free(self.directory)
            return fits and file.blake3 not in self._entries

    def pin(self, entry: Entry) -> None:
        """One lease more on an entry that is already held."""
        with self._lock:
            entry.leases += 1

    def lease_sealed(self, digest: str) -> Sealed | None:
        """The sealed copy of a file, pinned until `release`; None if there is none (yet)."""
        with self._lock:
            sealed = self._sealed.get(digest)
            if sealed is None or sealed.fd < 0:
                return None
            sealed.leases += 1
            sealed.used = time.monotonic()
            return sealed

    def begin_sealing(self, file: FileEntry) -> Sealed | None:
        """Room for a sealed copy, if there is any beside all files of the release; nothing is evicted for it."""
        with self._lock:
            files = sum(e.file.size for e in self._entries.values())
            copies = sum(x.file.size for x in self._sealed.values())
            if file.blake3 in self._sealed or max(files, self._release) + copies + file.size > self.budget:
                return None
            sealed = self._sealed[file.blake3] = Sealed(file)
            return sealed

    def end_sealing(self, sealed: Sealed, fd: int) -> None:
        """`fd`: the sealed and proven copy, ours from now on; -1 = there is none."""
        with self._lock:
            sealed.fd, sealed.used = fd, time.monotonic()
            if sealed.given_up:
                sealed.close()
            elif fd < 0:
                self._sealed.pop(sealed.file.blake3, None)

    def unaltered(self, entry: Entry) -> bool:
        """A complete file looks as it did when it was verified; `lease` drops one that does not."""
        return entry.state != "present" or _stat(entry.path) == entry.stat

    def altered(self, entry: Entry) -> None:
        """The file is not what was verified: nobody finds it any more."""
        with self._lock:
            if self._entries.get(entry.file.blake3) is entry:
                self.stale += 1
                self._drop(entry)

    def release(self, entry: Entry | Sealed) -> None:
        with self._lock:
            entry.leases -= 1
            entry.used = time.monotonic()

    def verified(self, entry: Entry, index: int) -> None:
        """Range `index` holds the right bytes. The last one makes the entry present."""
        with self._lock:
            if not entry.ready[index]:
                entry.ready[index] = 1
                entry.missing -= 1
                if entry.missing == 0 and entry.reserved:
                    self._complete(entry)
        entry.wake()

    def failed(self, entry: Entry, error: DynamoBlobError) -> None:
        """The file cannot be had, or what lies here is wrong: never served again from this entry."""
        with self._lock:
            if entry.state != "failed":
                entry.state, entry.error, entry.working = "failed", error, False
                self._drop(entry)
        entry.wake()

    def entry(self, digest: str) -> Entry | None:
        with self._lock:
            return self._entries.get(digest)

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {
                "directory": str(self.directory), "budget_bytes": self.budget, "used_bytes": self.used, "entries": len(self._entries),
                "present": sum(e.state == "present" for e in self._entries.values()), "leases": sum(e.leases for e in self._held()),
                "sealed": sum(x.fd >= 0 for x in self._sealed.values()),
                "evicted": self.evicted, "refused": self.refused, "stale": self.stale,
            }  # fmt: skip

    def close(self) -> None:
        """Give the directory up; complete files stay for the next service, unfinished ones go."""
        with self._lock:
            for entry in self._entries.values():
                entry.writer = None
                if entry.state == "filling":
                    entry.path.unlink(missing_ok=True)
            for sealed in self._sealed.values():
                sealed.close()
            self._sealed.clear()
            os.close(self._owner)

    def _make_room(self, file: FileEntry) -> None:
        if file.size <= self.budget:
            free = self.budget - self.used
            unpinned = [e for e in self._held() if not e.pinned]
            for entry in sorted(unpinned, key=lambda e: (isinstance(e, Entry), e.used)):
                if free >= file.size:
                    break
                free += entry.file.size
                if isinstance(entry, Sealed):
                    self._sealed.pop(entry.file.blake3).close()
                    continue
                self.evicted += 1
                self._drop(entry)
            if free >= file.size:
                return
        self.refused += 1
        raise DynamoBlobError(
            "WEIGHTS-CACHE-FULL", "the node cache has no room for this file", where=str(self.directory),
            why=f"{file.path} has {file.size} bytes, the budget is {self.budget}, {self.used} in use and mapped", do="raise weights.cache_bytes; workers read Blob meanwhile",
        )  # fmt: skip

    def _create(self, file: FileEntry) -> Entry:
        path = self.directory / "partial" / f"{file.blake3}.{time.monotonic_ns()}"
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(fd, file.size)
            os.fchmod(fd, 0o444)
            if self._uid >= 0:
                os.fchown(fd, self._uid, self._uid)
            if _free(self.directory) < file.size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # known before a byte is read in vain
            array = _map(path, file.size)
            writer = Writer(fd, file.size)
        except OSError as e:
            with contextlib.suppress(OSError):
                path.unlink()
            if fd >= 0:
                os.close(fd)
            raise self._no_room(file, e) from None
        entry = self._entries[file.blake3] = Entry(
            file, path, self.directory / "objects" / file.blake3, array, "filling"
        )
        entry.writer = writer
        return entry

    def reserve(self, entry: Entry, stopped: Callable[[], bool] = lambda: False) -> None:
        """Give a new file all its pages before a worker maps it: a hole on a full file system is SIGBUS for whoever
        touches it. Ranges are written meanwhile. Raises WEIGHTS-CACHE-FULL."""
        writer = entry.writer
        if entry.reserved or writer is None:
            return
        try:
            if not writer.reserve(lambda: stopped() or entry.state == "failed"):
                return
        except OSError as e:
            raise self._no_room(entry.file, e) from None
        with self._lock:
            entry.reserved = True
            if entry.missing == 0 and entry.state == "filling":
                self._complete(entry)
        entry.wake()

    def write(self, entry: Entry, offset: int, data: memoryview, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Verified bytes into a new file; False if the entry failed meanwhile, or `stopped()`. Raises WEIGHTS-CACHE-FULL."""
        writer = entry.writer
        if writer is None:
            return False
        try:
            return writer.write(offset, data, lambda: stopped() or entry.state == "failed")
        except OSError as e:
            raise self._no_room(entry.file, e) from None

    def _no_room(self, file: FileEntry, e: OSError) -> DynamoBlobError:
        self.refused += 1
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return DynamoBlobError(
            "WEIGHTS-CACHE-FULL" if full else "WEIGHTS-CACHE-ENTRY",
            "the file system of the node cache is full" if full else "the node cache cannot be written",
            where=str(self.directory), why=f"{file.size} bytes wanted, {_free(self.directory)} free: {e.strerror}",
            do="give the volume the size of cache_bytes; workers read Blob meanwhile",
        )  # fmt: skip

    def _complete(self, entry: Entry) -> None:
        if entry.state == "filling":
            os.replace(entry.path, entry.final)
            entry.path = entry.final
        entry.writer = None
        entry.stat = _stat(entry.path)
        entry.state, entry.working = "present", False
        self.completed(entry)

    def _drop(self, entry: Entry) -> None:
        """Out of the directory. Workers that map it keep their pages; nobody finds it any more."""
        log.info(
            "%s leaves the node cache (%s, stat %s, was %s)",
            entry.file.path,
            entry.state,
            _stat(entry.path),
            entry.stat,
        )
        entry.writer = None
        if self._entries.get(entry.file.blake3) is entry:
            del self._entries[entry.file.blake3]
        with contextlib.suppress(OSError):
            entry.path.unlink()


def _remove(path: Path) -> None:
    """Whatever lies there; what cannot be removed is never served, so it may stay."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _free(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def _map(path: Path, size: int) -> np.ndarray[Any, Any]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        return map_file(fd, size)
    finally:
        os.close(fd)


def _stat(path: Path) -> tuple[int, ...]:
    try:
        s = path.lstat()
    except OSError:
        return ()
    return s.st_ino, s.st_size, s.st_mtime_ns, s.st_mode, s.st_uid
