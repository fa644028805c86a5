"""Compile caches and the like, attached to a release as code.

What they are good for is said by a selector: {engine, torch, gpu_arch, config_digest}. They are found
by it exactly; anything else is ignored with a reason, never used "because it is near". They are code,
so the same rule as for the release holds: signed by an accepted publisher, and approved by an accepted
approver where `trust.require` is approval. Nothing is unpacked that was not compared with its digest.

    artifacts/<model>/<version>/<selector digest>.json             signed: selector, release manifest digest, files
    <container>-approvals: approvals/<model>/<version>.artifacts/<selector digest>.json   signed by an approver
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.registry import audit, signing
from components.common.registry.config import TrustConfig
from components.common.registry.hashing import hash_file
from components.common.registry.layout import Layout, path_problem
from components.common.registry.manifest import RANGE_BYTES, FileEntry, canonical_json
from components.common.registry.progress import Meter, Report
from components.common.registry.publish import scan
from components.common.registry.release import Stored
from components.common.registry.signing import SigningKey
from components.common.registry.upload import upload
from components.common.storage.account import Account, BlobInfo
from components.common.storage.errors import StorageError

FORMAT = "dynamo-blob.artifacts/1"
APPROVAL_FORMAT = "dynamo-blob.artifacts-approval/1"
SELECTOR = ("engine", "torch", "gpu_arch", "config_digest")


@dataclass(frozen=True)
class Artifacts:
    """Files that fit. `reason` says why there are none (then `files` is empty)."""

    files: tuple[FileEntry, ...] = ()
    reason: str = ""

    def fetch(self, account: Account, layout: Layout, target: Path) -> None:
        """Write the files under `target`, each compared before it gets its name. Raises REGISTRY-OBJECT-CORRUPT."""
        for file in self.files:
            path = target / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            data = _content(account, layout, file)
            scratch = path.with_name(f".{path.name}.part")
            scratch.write_bytes(data)
            scratch.replace(path)


def _content(account: Account, layout: Layout, file: FileEntry) -> bytes:
    """The bytes of `file`, compared. Raises REGISTRY-OBJECT-MISSING or -CORRUPT."""
    where, data = account.uri(layout.container, file.blob), _get(account, layout.container, file.blob)
    if data is None:
        raise DynamoBlobError(
            "REGISTRY-OBJECT-MISSING", f"the object of artifact {file.path} is not in the registry", where=where,
            why="attaching was interrupted, or someone removed it", do="attach the same directory again: it goes on where it stopped",
        )  # fmt: skip
    if blake3(data).hexdigest() != file.blake3:
        raise DynamoBlobError(
            "REGISTRY-OBJECT-CORRUPT", f"the object of artifact {file.path} is not what was signed", where=where,
            why=f"expected blake3 {file.blake3}, found {blake3(data).hexdigest()}", do="attach the artifacts again",
        )  # fmt: skip
    return data


def selector_digest(selector: dict[str, str]) -> str:
    """Digest of a complete selector. Raises REGISTRY-ARTIFACT-SELECTOR."""
    if set(selector) != set(SELECTOR) or not all(selector.values()):
        raise DynamoBlobError(
            "REGISTRY-ARTIFACT-SELECTOR",
            "the selector of artifacts is not complete",
            why=f"wanted {', '.join(SELECTOR)}; got {', '.join(sorted(selector)) or 'nothing'}",
        )
    return signing.digest(canonical_json(selector))


def artifact_prefix(model: str, version: str) -> str:
    return f"artifacts/{model}/{version}/"


def artifact_lists(account: Account, layout: Layout, model: str, version: str) -> list[BlobInfo]:
    """The lists attached to exactly this release: version `b` of model `a` and model `a/b` share a prefix."""
    prefix = artifact_prefix(model, version)
    return [i for i in account.list(layout.container, prefix) if "/" not in i.name.removeprefix(prefix)]


def _approval(layout: Layout, model: str, version: str, selector: dict[str, str]) -> str:
    return f"approvals/{model}/{version}.artifacts/{selector_digest(selector)}.json"


def attach(
    account: Account,
    layout: Layout,
    stored: Stored,
    directory: Path,
    selector: dict[str, str],
    key: SigningKey,
    *,
    progress: Report | None = None,
) -> str:
    """Attach the files under `directory`; name of the signed list. Raises REGISTRY-ARTIFACT-TAKEN if others are attached for the selector."""
    model, version = stored.manifest.model, stored.manifest.version
    name = artifact_prefix(model, version) + selector_digest(selector) + ".json"
    files = []
    for path_name, path in scan(directory):
        d = hash_file(path)
        files.append(
            (
                path,
                FileEntry(
                    path=path_name,
                    size=d.size,
                    blake3=d.blake3,
                    sha256=d.sha256,
                    blob=layout.object(d.blake3),
                    ranges=d.ranges,
                ),
            )
        )
    document = {
        "format": FORMAT, "model": model, "version": version, "manifest": stored.digest, "selector": selector,
        "files": [e.model_dump(mode="json") for _, e in files],
    }  # fmt: skip
    data = key.sign(document)
    try:
        account.create(layout.container, name, data)  # first: it is the root that keeps the collector away
    except StorageError as e:
        if e.code != "STORAGE-CONFLICT":
            raise
        if account.get(layout.container, name) != data:
            raise DynamoBlobError(
                "REGISTRY-ARTIFACT-TAKEN", "other artifacts are attached for this selector", where=account.uri(layout.container, name), do="use a new config digest",
            ) from None  # fmt: skip
    meter = Meter("upload", sum(e.size for _, e in files), progress)
    upload(account, layout, files, RANGE_BYTES, meter)
    meter.finish()
    audit.append(
        account,
        layout,
        model=model,
        action="attach",
        phase="done",
        version=version,
        manifest=stored.digest,
        subject=signing.digest(data),
        key=key,
    )
    return name


def approve_artifacts(
    account: Account, layout: Layout, stored: Stored, selector: dict[str, str], key: SigningKey
) -> None:
    """An approver vouches for what is attached now under `selector`, every byte compared.

    Raises REGISTRY-ARTIFACT-MISSING, REGISTRY-APPROVAL-SELF, REGISTRY-OBJECT-MISSING, REGISTRY-OBJECT-CORRUPT.
    """
    model, version = stored.manifest.model, stored.manifest.version
    name = artifact_prefix(model, version) + selector_digest(selector) + ".json"
    data = _get(account, layout.container, name)
    where = account.uri(layout.container, name)
    if data is None:
        raise DynamoBlobError("REGISTRY-ARTIFACT-MISSING", "nothing is attached for this selector", where=where)
    document = signing.parse(data, code="REGISTRY-ARTIFACT-CORRUPT", what="the list of artifacts", where=where)
    if document.get("key") == key.public:
        raise DynamoBlobError(
            "REGISTRY-APPROVAL-SELF",
            "the publisher cannot approve its own artifacts",
            where=where,
            do="someone else must approve, with another key",
        )
    for item in document.get("files", []):
        _content(account, layout, FileEntry.parse(item, where=where))
    approval = key.sign({"format": APPROVAL_FORMAT, "artifacts": signing.digest(data), "approved_at": audit.now_iso()})
    account.create(layout.approvals, _approval(layout, model, version, selector), approval)
    audit.append(
        account,
        layout,
        model=model,
        action="approve-artifacts",
        phase="done",
        version=version,
        manifest=stored.digest,
        subject=signing.digest(approval),
        key=key,
    )


def find(account: Account, layout: Layout, stored: Stored, selector: dict[str, str], trust: TrustConfig) -> Artifacts:
    """The artifacts for exactly this selector, proven; otherwise none and the reason. Never raises for a missing or bad list."""
    model, version = stored.manifest.model, stored.manifest.version
    name = artifact_prefix(model, version) + selector_digest(selector) + ".json"
    where = account.uri(layout.container, name)
    data = _get(account, layout.container, name)
    if data is None:
        return Artifacts(reason=_nearest(account, layout, model, version, selector))
    try:
        document = signing.parse(data, code="REGISTRY-ARTIFACT-CORRUPT", what="the list of artifacts", where=where)
        if trust.require != "none":
            signing.verify(document, trust.publisher_keys, kind="ARTIFACT", what="the list of artifacts", where=where)
        if (
            document.get("format") != FORMAT
            or document.get("selector") != selector
            or document.get("manifest") != stored.digest
        ):
            return Artifacts(reason=f"REGISTRY-ARTIFACT-MISMATCH: {where} is for another release or selector")
        if trust.require == "approval":
            _check_approval(
                account, layout, model, version, selector, signing.digest(data), str(document["key"]), trust
            )
        files = tuple(FileEntry.parse(f, where=where) for f in document.get("files", []))
    except DynamoBlobError as e:
        if e.code.startswith("STORAGE-"):
            raise
        return Artifacts(reason=f"{e.code}: {e.what}")
    unsafe = [f.path for f in files if path_problem(f.path) or f.blob != layout.object(f.blake3)]
    return (
        Artifacts(reason=f"REGISTRY-ARTIFACT-CORRUPT: {unsafe[0]} leaves its directory") if unsafe else Artifacts(files)
    )


def _check_approval(
    account: Account,
    layout: Layout,
    model: str,
    version: str,
    selector: dict[str, str],
    digest: str,
    publisher: str,
    trust: TrustConfig,
) -> None:
    name = _approval(layout, model, version, selector)
    where = account.uri(layout.approvals, name)
    data = _get(account, layout.approvals, name)
    if data is None:
        raise DynamoBlobError("REGISTRY-ARTIFACT-UNAPPROVED", "the artifacts are not approved", where=where)
    approval = signing.parse(data, code="REGISTRY-ARTIFACT-CORRUPT", what="the approval of artifacts", where=where)
    key = signing.verify(
        approval, trust.approver_keys, kind="ARTIFACT-APPROVAL", what="the approval of artifacts", where=where
    )
    if key == publisher:
        raise DynamoBlobError(
            "REGISTRY-ARTIFACT-APPROVAL-SELF", "the publisher approved its own artifacts", where=where
        )
    if approval.get("format") != APPROVAL_FORMAT or approval.get("artifacts") != digest:
        raise DynamoBlobError("REGISTRY-ARTIFACT-UNAPPROVED", "the approval is for other artifacts", where=where)


def _nearest(account: Account, layout: Layout, model: str, version: str, selector: dict[str, str]) -> str:
    best: tuple[int, str] = (-1, "")
    for info in artifact_lists(account, layout, model, version):
        try:
            data = _get(account, layout.container, info.name) or b""
            document: dict[str, Any] = signing.parse(
                data, code="REGISTRY-ARTIFACT-CORRUPT", what="a list", where=info.name
            )
            other = dict(document.get("selector", {}))
        except (DynamoBlobError, TypeError, ValueError) as e:
            if isinstance(e, StorageError):
                raise
            continue  # a damaged list says nothing about what would fit
        differs = [f"{k} {other.get(k)} there, {selector[k]} here" for k in SELECTOR if other.get(k) != selector[k]]
        best = max(best, (len(SELECTOR) - len(differs), "; ".join(differs)))
    return f"REGISTRY-ARTIFACT-MISMATCH: {best[1]}" if best[1] else "REGISTRY-ARTIFACT-MISSING: nothing is attached"


def artifact_objects(account: Account, layout: Layout) -> set[str]:
    """Objects that any list of artifacts names. Raises REGISTRY-ARTIFACT-CORRUPT: then nothing may be collected."""
    used: set[str] = set()
    for info in account.list(layout.container, "artifacts/"):
        data = _get(account, layout.container, info.name)
        if data is not None:
            document = signing.parse(
                data,
                code="REGISTRY-ARTIFACT-CORRUPT",
                what="a list of artifacts",
                where=account.uri(layout.container, info.name),
            )
            used |= {str(f["blob"]) for f in document.get("files", [])}
    return used


def _get(account: Account, container: str, name: str) -> bytes | None:
    try:
        return account.get(container, name)
    except StorageError as e:
        if e.code == "STORAGE-NOT-FOUND":
            return None
        raise
