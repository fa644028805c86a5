"""Objects into the store: content-addressed, created once, in parallel, resumable, deduplicated.

A file is staged as blocks named by position and digest, and becomes visible by one Put Block List with
``If-None-Match: *``. Blocks staged by an interrupted run are found and not sent again. Each block is
hashed again as it is sent, so that what is stored is what was hashed.

Safe against the collector (see `retire`): an object that exists already is touched under its ETag, so
that a collector which listed it before can no longer delete it.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.registry.layout import Layout
from components.common.registry.manifest import FileEntry
from components.common.registry.progress import Meter
from components.common.storage.account import Account, BlobInfo
from components.common.storage.errors import StorageError

_ONE_PUT = 32 * 2**20  # files up to this size go in one request
_TINY = 64 * 2**10  # files up to this size are sent without asking first: the question would cost as much
_TRIES = 5  # of the dance of find, touch and create against a collector


def upload(
    account: Account,
    layout: Layout,
    files: Sequence[tuple[Path, FileEntry]],
    range_bytes: int,
    meter: Meter,
    parallel: int = 4,
) -> None:
    """Make every file's object exist. Memory: `parallel` ranges (or `parallel` small files).

    Raises REGISTRY-SOURCE-CHANGED, REGISTRY-OBJECT-CORRUPT or a StorageError; blocks already staged
    stay for the next try.
    """
    unique = {entry.blake3: (path, entry) for path, entry in files}
    repeated = sum(e.size for _, e in files) - sum(e.size for _, e in unique.values())
    if repeated:
        meter.add(repeated, skipped=True)
    small = [v for v in unique.values() if v[1].size <= _ONE_PUT]
    large = [v for v in unique.values() if v[1].size > _ONE_PUT]
    with ThreadPoolExecutor(parallel, thread_name_prefix="upload") as pool:
        try:
            for future in [
                pool.submit(_small, account, layout, path, entry, range_bytes, meter) for path, entry in small
            ]:
                future.result()
            for path, entry in large:
                _large(account, layout, path, entry, range_bytes, meter, pool)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def keep(account: Account, layout: Layout, digest: str, size: int) -> bool:
    """If the object exists, protect it from a collection in progress and return True."""
    name = layout.object(digest)
    for _ in range(_TRIES):
        info = account.find(layout.container, name)
        if info is None:
            return False
        _check_size(account, layout, info, size)
        try:
            account.touch(layout.container, name, info.etag, digest[:16])
            return True
        except StorageError as e:
            if e.data.get("storage_code") == "BlobImmutableDueToPolicy":
                return True  # nobody can delete it either
            if e.code not in ("STORAGE-PRECONDITION", "STORAGE-NOT-FOUND"):
                raise
    raise DynamoBlobError(
        "REGISTRY-CONTENTION", "an object is changed by others all the time", where=account.uri(layout.container, name),
        why=f"{_TRIES} tries", do="see who else publishes or collects now; try again",
    )  # fmt: skip


def _check_size(account: Account, layout: Layout, info: BlobInfo, size: int) -> None:
    if info.size != size:
        raise DynamoBlobError(
            "REGISTRY-OBJECT-CORRUPT", "an object of the registry has the wrong size", where=account.uri(layout.container, info.name),
            why=f"{info.size} bytes, its content has {size}", do="delete it with the collector's identity, then publish again",
        )  # fmt: skip


def _small(account: Account, layout: Layout, path: Path, entry: FileEntry, range_bytes: int, meter: Meter) -> None:
    if entry.size > _TINY and keep(account, layout, entry.blake3, entry.size):
        meter.add(entry.size, skipped=True)
        return
    data = path.read_bytes()
    if len(data) != entry.size or blake3(data).hexdigest() != entry.blake3:
        raise _changed(path)
    sent = _settle(account, layout, entry, lambda: account.create(layout.container, layout.object(entry.blake3), data))
    meter.add(entry.size, skipped=not sent)


def _large(
    account: Account,
    layout: Layout,
    path: Path,
    entry: FileEntry,
    range_bytes: int,
    meter: Meter,
    pool: ThreadPoolExecutor,
) -> None:
    if keep(account, layout, entry.blake3, entry.size):
        meter.add(entry.size, skipped=True)
        return
    name = layout.object(entry.blake3)
    ids = [block_id(i, digest) for i, digest in enumerate(entry.ranges)]
    staged = account.staged(layout.container, name)
    fd = os.open(path, os.O_RDONLY)

    def send(index: int) -> None:
        offset = index * range_bytes
        length = min(range_bytes, entry.size - offset)
        if ids[index] in staged:
            meter.add(length, skipped=True)
            return
        data = os.pread(fd, length, offset)
        if len(data) != length or blake3(data).hexdigest() != entry.ranges[index]:
            raise _changed(path)
        account.stage(layout.container, name, ids[index], data)
        meter.add(length)

    try:
        futures = [pool.submit(send, i) for i in range(len(ids))]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            for future in futures:  # no thread may still read `fd`
                if not future.cancelled():
                    future.exception()
        _settle(account, layout, entry, lambda: account.commit(layout.container, name, ids))
    finally:
        os.close(fd)


def _settle(account: Account, layout: Layout, entry: FileEntry, create: Callable[[], object]) -> bool:
    """Run `create`, True; or, if the object is there already, protect it, False. A collector may take it away in between."""
    for attempt in range(1, _TRIES + 1):
        try:
            create()
            return True
        except StorageError as e:
            if e.code not in ("STORAGE-CONFLICT", "STORAGE-PRECONDITION"):
                raise
            if keep(account, layout, entry.blake3, entry.size):
                return False
            if attempt == _TRIES:
                raise
    raise AssertionError("unreachable")


def block_id(index: int, digest: str) -> str:
    """Block id of the range at `index` with this digest: equal ids mean equal bytes at the same place."""
    return base64.b64encode(f"{index:08d}-{digest[:32]}".encode()).decode()


def _changed(path: Path) -> DynamoBlobError:
    return DynamoBlobError(
        "REGISTRY-SOURCE-CHANGED", "the file changed between hashing and sending", where=str(path), do="publish from a directory nobody writes to",
    )  # fmt: skip
