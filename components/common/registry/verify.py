"""Every byte of a release compared with its manifest, at the speed of the store.

Ranges are fetched by several threads into one buffer each; each MiB is hashed (blake3) as it lands, still
in the CPU's cache, while other threads receive. Memory is `parallel` ranges whatever the size of the model. The range digests are pinned by the manifest, so
they prove the whole file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.registry.layout import Layout
from components.common.registry.manifest import FileEntry, Manifest
from components.common.registry.progress import Meter, Report
from components.common.storage.account import Account
from components.common.storage.errors import StorageError
from components.common.storage.ranges import RangeReader

_TRIES = 3  # of one range, on errors that may pass
_SHOWN = 20  # problems kept; the rest is counted


@dataclass
class Verified:
    """`bytes` compared in `seconds`; `problems` found (at most 20 kept, `count` in all)."""

    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    problems: list[DynamoBlobError] = field(default_factory=list)
    count: int = 0

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / max(1e-6, self.seconds)

    def raise_first(self) -> Verified:
        if self.problems:
            raise self.problems[0]
        return self


def verify_content(
    account: Account, layout: Layout, manifest: Manifest, *, progress: Report | None = None, parallel: int = 4
) -> Verified:
    """Compare every object of `manifest`. Problems: REGISTRY-OBJECT-MISSING, REGISTRY-OBJECT-CORRUPT; storage faults raise."""
    reader = RangeReader(account.config, account.credential, pool=parallel)
    meter = Meter("verify", sum(f.size for f in manifest.files), progress)
    result = Verified(files=len(manifest.files))
    lock, buffers = threading.Lock(), threading.local()
    bad: set[str] = set()

    def problem(error: DynamoBlobError, path: str) -> None:
        with lock:
            bad.add(path)
            result.count += 1
            if len(result.problems) < _SHOWN:
                result.problems.append(error)

    def head(file: FileEntry) -> None:
        container, blob = layout.place(file)
        info = account.find(container, blob)
        if info is None:
            problem(_missing(account, layout, file), file.path)
        elif info.size != file.size:
            problem(_corrupt(account, layout, file, f"{info.size} bytes, expected {file.size}"), file.path)

    def one(job: tuple[FileEntry, int]) -> None:
        file, index = job
        if file.path in bad and result.count >= _SHOWN:
            return
        if not hasattr(buffers, "view"):
            buffers.view = memoryview(bytearray(manifest.range_bytes))
        offset = index * manifest.range_bytes
        view = buffers.view[: min(manifest.range_bytes, file.size - offset)]
        container, blob = layout.place(file)
        try:
            found = read(reader, container, blob, offset, view)
        except StorageError as e:
            if e.code == "STORAGE-NOT-FOUND":
                return  # `head` has told
            if e.code == "STORAGE-RANGE" or e.status == 416:
                return problem(_corrupt(account, layout, file, f"it ends before byte {offset + len(view)}"), file.path)
            raise
        if found != file.ranges[index]:
            problem(range_error(account, layout, file, index, manifest.range_bytes, found), file.path)
        meter.add(len(view))

    def jobs() -> Iterator[tuple[FileEntry, int]]:
        for file in manifest.files:
            if file.path not in bad:
                yield from ((file, i) for i in range(len(file.ranges)))

    try:
        with ThreadPoolExecutor(parallel, thread_name_prefix="verify") as pool:
            list(pool.map(head, manifest.files))
            list(pool.map(one, jobs()))
    finally:
        reader.close()
    meter.finish()
    result.bytes, result.seconds = meter.done, meter.seconds
    result.problems.sort(key=lambda e: e.where)
    return result


def read(reader: RangeReader, container: str, blob: str, offset: int, view: memoryview) -> str:
    """`read_into` with a few tries for faults that pass; blake3 of what landed."""
    attempt = 1
    while True:
        digest = blake3()
        try:
            reader.read_into(container, blob, offset, view, on_bytes=digest.update)
            return digest.hexdigest()
        except StorageError as e:
            if attempt == _TRIES or not e.retryable:
                raise
            attempt += 1


class ProvenReader:
    """Random reads from one file of a release, each range compared with the manifest before its bytes are used."""

    def __init__(self, account: Account, layout: Layout, manifest: Manifest, file: FileEntry) -> None:
        self._account, self._layout, self._file = account, layout, file
        self._step = manifest.range_bytes
        self._index, self._data = -1, b""

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length), clipped to the file. Raises REGISTRY-OBJECT-MISSING or -CORRUPT."""
        end, out = min(offset + length, self._file.size), bytearray()
        while offset < end:
            piece = self._range(offset // self._step)
            at = offset % self._step
            out += piece[at : at + end - offset]
            offset = min(end, (offset // self._step + 1) * self._step)
        return bytes(out)

    def _range(self, index: int) -> bytes:
        if index != self._index:
            container, blob = self._layout.place(self._file)
            try:
                data = self._account.get(container, blob, index * self._step, self._step)
            except StorageError as e:
                if e.code == "STORAGE-NOT-FOUND":
                    raise _missing(self._account, self._layout, self._file) from None
                if e.code == "STORAGE-RANGE":
                    raise _corrupt(self._account, self._layout, self._file, "it is too short") from None
                raise
            found = blake3(data).hexdigest()
            if found != self._file.ranges[index]:
                raise range_error(self._account, self._layout, self._file, index, self._step, found)
            self._index, self._data = index, data
        return self._data


def range_error(
    account: Account, layout: Layout, file: FileEntry, index: int, step: int, found: str
) -> DynamoBlobError:
    at = index * step
    return _corrupt(
        account, layout, file, f"bytes {at}-{min(file.size, at + step) - 1}: expected blake3 {file.ranges[index]}, found {found}",
        range=index, expected=file.ranges[index], found=found,
    )  # fmt: skip


def _missing(account: Account, layout: Layout, file: FileEntry) -> DynamoBlobError:
    return DynamoBlobError(
        "REGISTRY-OBJECT-MISSING", f"the object of {file.path} is gone", where=account.uri(*layout.place(file)),
        do="restore it from soft delete or an archive, or publish the same files again", file=file.path,
    )  # fmt: skip


def _corrupt(account: Account, layout: Layout, file: FileEntry, why: str, **data: object) -> DynamoBlobError:
    return DynamoBlobError(
        "REGISTRY-OBJECT-CORRUPT", f"the object of {file.path} is not what the manifest names", where=account.uri(*layout.place(file)), why=why,
        do="restore it from an earlier version or an archive; find out who wrote to it", file=file.path, **data,
    )  # fmt: skip
