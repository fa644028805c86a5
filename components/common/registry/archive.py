"""Archive: a release copied byte for byte to another account, on a cool tier, provable there with the same keys.

Everything streams through this process, each range compared with the manifest on the way, so that an
archive is never worse than its source. Order: objects, manifest, approval, audit record, signature (visible
last). Running it again copies what is missing and brings approval and record up to date.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from components.common.errors import DynamoBlobError
from components.common.registry import audit
from components.common.registry.layout import Layout
from components.common.registry.manifest import FileEntry, Manifest
from components.common.registry.progress import Meter, Report
from components.common.registry.release import load
from components.common.registry.signing import SigningKey
from components.common.registry.upload import block_id
from components.common.registry.verify import range_error, read
from components.common.storage.account import Account
from components.common.storage.errors import StorageError
from components.common.storage.ranges import RangeReader

_APPEND = 4 * 2**20  # bytes of one Append Block


@dataclass(frozen=True)
class Archived:
    copied: int
    skipped: int
    seconds: float
    uri: str


def archive(
    source: Account,
    layout: Layout,
    model: str,
    version: str,
    target: Account,
    *,
    tier: str = "Cool",
    key: SigningKey | None = None,
    progress: Report | None = None,
    parallel: int = 4,
) -> Archived:
    """Copy `model` `version` to `target` (same container names, created if missing), objects on `tier` (Hot, Cool, Cold, Archive)."""  # fmt: skip
    stored = load(source, layout, model, version)
    files = {layout.place(f): f for f in stored.manifest.files}
    for container in {c for c, _ in files} | set(layout.containers):
        target.ensure_container(container)
    meter = Meter("archive", sum(f.size for f in files.values()), progress)
    reader = RangeReader(source.config, source.credential, pool=parallel)
    try:
        with ThreadPoolExecutor(parallel, thread_name_prefix="archive") as pool:
            for (container, blob), file in sorted(files.items()):
                _copy(reader, source, layout, target, container, blob, file, stored.manifest, tier, meter, pool)
    finally:
        reader.close()
    _put_once(target, layout.container, layout.manifest(model, version), stored.manifest_bytes)
    approval = layout.approval(model, version)
    if source.find(layout.approvals, approval):
        _put_latest(target, layout.approvals, approval, source.get(layout.approvals, approval))
    _copy_record(source, target, layout, model)
    name = layout.signature(model, version)
    _put_once(target, layout.container, name, source.get(layout.container, name))
    meter.finish()
    audit.append(
        source,
        layout,
        model=model,
        action="archive",
        phase="done",
        version=version,
        manifest=stored.digest,
        key=key,
        detail={"to": target.url, "tier": tier},
    )
    return Archived(
        meter.done - meter.skipped,
        meter.skipped,
        meter.seconds,
        target.uri(layout.container, layout.manifest(model, version)),
    )


def _copy(
    reader: RangeReader, source: Account, layout: Layout, target: Account, container: str, blob: str, file: FileEntry, manifest: Manifest,
    tier: str, meter: Meter, pool: ThreadPoolExecutor,
) -> None:  # fmt: skip
    there = target.find(container, blob)
    if there is not None:
        if there.size != file.size:
            raise _differs(target, container, blob)
        meter.add(file.size, skipped=True)
        return
    step, buffers = manifest.range_bytes, threading.local()

    def one(index: int) -> None:
        if not hasattr(buffers, "view"):
            buffers.view = memoryview(bytearray(step))
        view = buffers.view[: min(step, file.size - index * step)]
        found = read(reader, container, blob, index * step, view)
        if found != file.ranges[index]:
            raise range_error(source, layout, file, index, step, found)
        target.stage(container, blob, block_id(index, found), bytes(view))
        meter.add(len(view))

    list(pool.map(one, range(len(file.ranges))))
    try:
        target.commit(container, blob, [block_id(i, d) for i, d in enumerate(file.ranges)], tier=tier)
    except StorageError as e:
        if e.code != "STORAGE-CONFLICT":
            raise


def _put_once(target: Account, container: str, name: str, data: bytes) -> None:
    try:
        target.create(container, name, data)
    except StorageError as e:
        if e.code != "STORAGE-CONFLICT":
            raise
        if target.get(container, name) != data:
            raise _differs(target, container, name) from None


def _put_latest(target: Account, container: str, name: str, data: bytes) -> None:
    there = target.find(container, name)
    if there is None:
        target.create(container, name, data)
    elif target.get(container, name) != data:
        target.replace(container, name, data, etag=there.etag)


def _copy_record(source: Account, target: Account, layout: Layout, model: str) -> None:
    """What the archive's audit record lacks is appended: without it nothing can be proven there."""
    audit.read(source, layout, model)  # the chain is whole
    prefix = f"audit/{model}/"
    for info in [i for i in source.list(layout.audit, prefix) if "/" not in i.name.removeprefix(prefix)]:
        data = source.get(layout.audit, info.name)
        target.append_open(layout.audit, info.name)
        there = target.get(layout.audit, info.name)
        if not data.startswith(there):
            raise _differs(target, layout.audit, info.name)
        for at in range(len(there), len(data), _APPEND):
            target.append(layout.audit, info.name, data[at : at + _APPEND], at=at)


def _differs(target: Account, container: str, name: str) -> DynamoBlobError:
    return DynamoBlobError(
        "REGISTRY-ARCHIVE-DIFFERS",
        "the archive holds something else under this name",
        where=target.uri(container, name),
        do="archive to an empty account, or verify both",
    )
