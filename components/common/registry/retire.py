"""Retire versions and collect the objects no release uses.

`retire` writes, in this order: the channel (nobody can promote the version any more; refused while a
channel points at it), a tombstone in the place of the signature (nobody can resolve it), and the
removal of the manifest. A crash leaves it retired; running it again finishes.

`collect` deletes objects without a manifest that names them. It is safe against a publish at the same
time without clocks or locks:

1. objects are listed with their ETags, 2. then manifests are read, 3. then each unreferenced object
is deleted only if its ETag is still the listed one.

A publisher writes its manifest before it relies on an existing object and changes the object's ETag
(`upload.keep`). If that happened before 1, step 2 sees the manifest; if after, step 3 does not match.
The grace period is not needed for this; it is time for people to change their mind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.registry import audit, signing
from components.common.registry.artifacts import artifact_lists, artifact_objects
from components.common.registry.channel import Channel, read_channel, swap
from components.common.registry.layout import Layout, check_names, split_release
from components.common.registry.manifest import Manifest
from components.common.registry.publish import TOMBSTONE_FORMAT
from components.common.registry.release import parse_manifest
from components.common.registry.signing import SigningKey
from components.common.storage.account import Account, BlobInfo
from components.common.storage.errors import StorageError

GRACE_S = 24 * 3600.0
ABANDONED_S = 7 * 24 * 3600.0


@dataclass
class Collected:
    """`objects` that were (or with dry_run would be) deleted and their `bytes`; `spared` were taken up again meanwhile."""

    dry_run: bool
    objects: list[str] = field(default_factory=list)
    bytes: int = 0
    kept: int = 0
    young: int = 0
    spared: int = 0
    abandoned: list[str] = field(default_factory=list)


def retire(account: Account, layout: Layout, model: str, version: str, key: SigningKey | None) -> None:
    """Retire one version; its objects go with the next `collect`. Raises REGISTRY-VERSION-IN-USE, REGISTRY-RELEASE-MISSING."""
    check_names(model, version)
    channel = read_channel(account, layout, model)
    manifest = account.find(layout.container, layout.manifest(model, version))
    done = channel is not None and version in channel.retired
    if manifest is None and not done:
        raise DynamoBlobError(
            "REGISTRY-RELEASE-MISSING", f"there is no release {version} of {model}", where=account.uri(layout.container, layout.manifest(model, version)),
            do="`dynamo release list` shows what there is",
        )  # fmt: skip
    digest = signing.digest(account.get(layout.container, manifest.name)) if manifest else ""

    def change(now: Channel) -> dict[str, Any]:
        if version in (now.current, now.previous):
            which = "current" if version == now.current else "previous"
            raise DynamoBlobError(
                "REGISTRY-VERSION-IN-USE", f"version {version} of {model} is {which}", where=now.uri, why="a rollback or restart would need it",
                do="promote another version first (twice, if it is to leave `previous` too)",
            )  # fmt: skip
        return {"retired": sorted({*now.retired, version}), "stack": [v for v in now.stack if v != version]}

    if not done:
        swap(account, layout, model, key, "retire", version, digest, change)
    bury(account, layout, model, version, digest)


def bury(account: Account, layout: Layout, model: str, version: str, digest: str) -> None:
    """Tombstone, then no manifest. The tombstone stays for ever: it keeps a late publisher from finishing."""
    name = layout.signature(model, version)
    tombstone = signing.unsigned({"format": TOMBSTONE_FORMAT, "model": model, "version": version, "manifest": digest})
    for _ in range(5):
        there = account.find(layout.container, name)
        try:
            if there is None:
                account.create(layout.container, name, tombstone)
            elif TOMBSTONE_FORMAT.encode() not in account.get(layout.container, name):
                account.replace(layout.container, name, tombstone, etag=there.etag)
            break
        except StorageError as e:
            if e.code not in ("STORAGE-CONFLICT", "STORAGE-PRECONDITION"):
                raise
    _delete(account, layout.container, layout.manifest(model, version))
    for info in artifact_lists(account, layout, model, version):
        _delete(account, layout.container, info.name)


def collect(
    account: Account,
    layout: Layout,
    *,
    dry_run: bool = True,
    grace_s: float = GRACE_S,
    abandoned_s: float = ABANDONED_S,
    now: float | None = None,
) -> Collected:
    """Delete objects that no release names and that are older than `grace_s` seconds.

    A publish that was begun more than `abandoned_s` ago and never finished is given up first (its version
    cannot be used again). Raises REGISTRY-COLLECT-UNSAFE, before deleting anything, if a manifest cannot be read.
    """
    at = time.time() if now is None else now
    result = Collected(dry_run)
    if not dry_run:
        result.abandoned = list(_give_up(account, layout, at - abandoned_s))
    objects = list(account.list(layout.container, "objects/"))
    used = referenced(account, layout)
    for info in objects:
        if info.name in used:
            result.kept += 1
        elif info.modified > at - grace_s:
            result.young += 1
        elif dry_run or _delete(account, layout.container, info.name, info):
            result.objects.append(info.name)
            result.bytes += info.size
        else:
            result.spared += 1
    return result


def referenced(account: Account, layout: Layout) -> set[str]:
    """Names of the objects that any manifest, committed or begun, or any artifact of theirs names."""
    used: set[str] = set()
    for model, version, name in manifests(account, layout):
        try:
            data = account.get(layout.container, name)
        except StorageError as e:
            if e.code == "STORAGE-NOT-FOUND":
                continue  # retired between the listing and now
            raise
        manifest = _manifest(data, model, version, account.uri(layout.container, name))
        used |= {f.blob for f in manifest.files if not f.container or f.container == layout.container}
    return used | artifact_objects(account, layout)


def manifests(account: Account, layout: Layout) -> Iterator[tuple[str, str, str]]:
    """(model, version, blob name) of every manifest, committed or not."""
    for info in account.list(layout.container, "releases/"):
        found = split_release(info.name)
        if found:
            yield (*found, info.name)


def _manifest(data: bytes, model: str, version: str, uri: str) -> Manifest:
    try:
        return parse_manifest(data, model, version, uri)
    except DynamoBlobError as e:
        raise DynamoBlobError(
            "REGISTRY-COLLECT-UNSAFE", "nothing is collected: a manifest cannot be read, so its objects are not known", where=uri, why=e.why,
            do="restore or retire that release first",
        ) from None  # fmt: skip


def _give_up(account: Account, layout: Layout, before: float) -> Iterator[str]:
    """Bury releases that were begun before `before` (unix s) and never committed, and finish burials that were cut short."""
    for info in list(account.list(layout.container, "releases/")):
        found = split_release(info.name)
        if not found:
            continue
        mark = layout.signature(*found)
        there = account.find(layout.container, mark)
        if there is None and info.modified < before:
            digest = signing.digest(account.get(layout.container, info.name))
            tombstone = signing.unsigned(
                {"format": TOMBSTONE_FORMAT, "model": found[0], "version": found[1], "manifest": digest}
            )
            try:
                account.create(layout.container, mark, tombstone)
            except StorageError as e:
                if e.code == "STORAGE-CONFLICT":
                    continue  # its publisher has just finished
                raise
            audit.append(
                account, layout, model=found[0], action="abandon", phase="done", version=found[1], manifest=digest
            )
        elif there is None or TOMBSTONE_FORMAT.encode() not in account.get(layout.container, mark):
            continue
        bury(account, layout, *found, signing.digest(account.get(layout.container, info.name)))
        yield f"{found[0]} {found[1]}"


def _delete(account: Account, container: str, name: str, info: BlobInfo | None = None) -> bool:
    """Delete, if it is still as listed when `info` is given; False if it is gone or changed."""
    try:
        account.delete(container, name, etag=info.etag if info else "")
        return True
    except StorageError as e:
        if e.code in ("STORAGE-NOT-FOUND", "STORAGE-PRECONDITION"):
            return False
        raise
