"""From a name to proven bytes: which release is served, and why it may be.

`resolve` follows a channel once (or takes the version given) and returns the manifest only if
everything `trust.require` asks for holds:

    none        the manifest is the one that was committed (digests prove the bytes, nobody vouches for them)
    signature   + signed by an accepted publisher key, the channel signed too, the audit record whole
    approval    + approved by an accepted approver key other than the publisher's, not expired

| refused with | when |
|---|---|
| REGISTRY-RELEASE-MISSING | no such version, or its manifest was removed |
| REGISTRY-RELEASE-INCOMPLETE | begun and never committed, or its signature was removed |
| REGISTRY-VERSION-RETIRED | retired |
| REGISTRY-MANIFEST-CORRUPT | not canonical, not a manifest, or of another release |
| REGISTRY-MANIFEST-MISMATCH | the manifest is not the one that was signed |
| REGISTRY-MANIFEST-PINNED | the digest is not the one the graph pins |
| REGISTRY-SIGNATURE-CORRUPT, -MISMATCH, -UNSIGNED, -UNKNOWN-KEY, -BAD-SIGNATURE | the signature |
| REGISTRY-UNAPPROVED, REGISTRY-APPROVAL-CORRUPT, -UNSIGNED, -UNKNOWN-KEY, -BAD-SIGNATURE, -SELF, -EXPIRED, -MISMATCH, -REPLAYED | the approval |
| REGISTRY-CHANNEL-MISSING, -EMPTY, -CORRUPT, -UNSIGNED, -UNKNOWN-KEY, -BAD-SIGNATURE, -MISMATCH, -REPLAYED | the channel |
| REGISTRY-AUDIT-MISSING, REGISTRY-AUDIT-TAMPERED, REGISTRY-AUDIT-UNRECORDED | the audit record |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from components.common.errors import DynamoBlobError
from components.common.messages.weights import Release
from components.common.registry import audit, signing
from components.common.registry.channel import Channel, read_channel
from components.common.registry.config import ReleaseConfig, TrustConfig
from components.common.registry.layout import Layout, check_names, path_problem
from components.common.registry.manifest import FORMAT, Manifest, weights_digest
from components.common.registry.publish import SIGNATURE_FORMAT, TOMBSTONE_FORMAT
from components.common.storage.account import Account
from components.common.storage.errors import StorageError

APPROVAL_FORMAT = "dynamo-blob.approval/1"
_READ_TRIES = 6  # of recording a read among others that start at the same time: a start does not wait longer for it


@dataclass(frozen=True)
class Stored:
    """A committed release as it lies in the registry; nothing about trust is decided yet."""

    manifest: Manifest
    manifest_bytes: bytes
    digest: str
    uri: str
    signature: dict[str, Any]
    signature_uri: str


@dataclass(frozen=True)
class Resolved:
    """What serving pins for the run. `audited` is False when the read could not be recorded."""

    manifest: Manifest
    manifest_bytes: bytes
    digest: str
    uri: str
    resolved_from: str
    publisher: str = ""
    approver: str = ""
    approved_at: str = ""
    expires_at: str = ""
    channel_sequence: int = 0
    audited: bool = False

    @property
    def age_s(self) -> float:
        """Seconds since the approval; 0 without one."""
        return max(0.0, time.time() - parse_time(self.approved_at)) if self.approved_at else 0.0

    def message(self) -> Release:
        """The answer of the weight service's /v1/release."""
        return Release(
            model=self.manifest.model, version=self.manifest.version, manifest_digest=self.digest, weights_digest=self.manifest.weights_digest,
            manifest_uri=self.uri, resolved_from=self.resolved_from, approver=self.approver, approved_at=self.approved_at, age_s=self.age_s,
        )  # fmt: skip


def resolve(account: Account, release: ReleaseConfig, trust: TrustConfig, *, record: bool = True) -> Resolved:
    """Resolve and prove `release`; `record` adds the read to the audit record. See the table above for what it raises."""
    check_names(release.model, release.version)
    layout = Layout(release.container)
    strict = trust.require != "none"
    records = _records(account, layout, release.model) if strict else []
    channel: Channel | None = None
    version, source = release.version, "version"
    if not version:
        channel = read_channel(account, layout, release.model)
        if channel is None:
            raise DynamoBlobError(
                "REGISTRY-CHANNEL-MISSING", f"{release.model} has no channel", where=account.uri(layout.approvals, layout.channel(release.model)),
                do="promote a version, or name one in the graph; if one was promoted, the channel was removed",
            )  # fmt: skip
        if strict:
            channel.check_trust(channel_keys(trust))
            channel.check_history(records, channel_keys(trust))
        version, source = channel.version_of(release.channel), f"channel:{release.channel}"
    stored = load(account, layout, release.model, version)
    if channel and strict and channel.manifest_of(version) not in ("", stored.digest):
        raise DynamoBlobError(
            "REGISTRY-CHANNEL-MISMATCH", "the release is not the one that was promoted", where=stored.uri,
            why=f"promoted {channel.manifest_of(version)}, found {stored.digest}", do="verify the release; promote it again if it is right",
        )  # fmt: skip
    if release.manifest_digest and stored.digest != release.manifest_digest:
        raise DynamoBlobError(
            "REGISTRY-MANIFEST-PINNED", "the release is not the one the graph pins", where=stored.uri,
            why=f"pinned {release.manifest_digest}, found {stored.digest}", do="correct `manifest_digest` in the graph if the change is meant",
        )  # fmt: skip
    publisher = _check_signature(stored, trust) if strict else str(stored.signature.get("key") or "")
    if strict:
        _check_recorded(records, stored, trust)
    approval = load_approval(account, layout, stored, trust, publisher, records) if trust.require == "approval" else {}
    audited = _record_read(account, layout, stored, source, channel) if record else False
    return Resolved(
        manifest=stored.manifest, manifest_bytes=stored.manifest_bytes, digest=stored.digest, uri=stored.uri, resolved_from=source,
        publisher=publisher, approver=str(approval.get("key", "")), approved_at=str(approval.get("approved_at", "")),
        expires_at=str(approval.get("expires_at", "")), channel_sequence=channel.sequence if channel else 0, audited=audited,
    )  # fmt: skip


def load(account: Account, layout: Layout, model: str, version: str) -> Stored:
    """The committed release `model` `version`, its parts consistent with each other."""
    name, sig_name = layout.manifest(model, version), layout.signature(model, version)
    uri, sig_uri = account.uri(layout.container, name), account.uri(layout.container, sig_name)
    signature_bytes = _get(account, layout.container, sig_name)
    if signature_bytes is not None:
        refuse_tombstone(signature_bytes, model, version, sig_uri)
    data = _get(account, layout.container, name)
    if data is None:
        raise DynamoBlobError(
            "REGISTRY-RELEASE-MISSING", f"there is no release {version} of {model}", where=uri,
            why="its signature is there, its manifest was removed" if signature_bytes is not None else "", do="`dynamo release list` shows what there is",
        )  # fmt: skip
    if signature_bytes is None:
        raise DynamoBlobError(
            "REGISTRY-RELEASE-INCOMPLETE", f"release {version} of {model} was begun and not finished, or its signature was removed", where=sig_uri,
            do="publish the same content again: it goes on where it stopped",
        )  # fmt: skip
    signature = signing.parse(signature_bytes, code="REGISTRY-SIGNATURE-CORRUPT", what="the signature", where=sig_uri)
    if signature.get("format") != SIGNATURE_FORMAT:
        raise DynamoBlobError(
            "REGISTRY-SIGNATURE-CORRUPT",
            "the signature is damaged",
            where=sig_uri,
            why="unknown format",
            do="restore it or publish anew",
        )
    digest = signing.digest(data)
    _check_own(signature, signature_bytes, sig_uri)
    if (signature.get("model"), signature.get("version")) != (model, version):
        raise DynamoBlobError(
            "REGISTRY-SIGNATURE-MISMATCH", "the signature is that of another release", where=sig_uri,
            why=f"it is for {signature.get('model')} {signature.get('version')}", do="it was exchanged: restore it or publish anew",
        )  # fmt: skip
    if signature.get("manifest") != digest:
        raise DynamoBlobError(
            "REGISTRY-MANIFEST-MISMATCH", "the manifest is not the one that was signed", where=uri,
            why=f"signed {signature.get('manifest')}, found {digest}", do="it was changed or exchanged: restore it or publish anew",
        )  # fmt: skip
    return Stored(parse_manifest(data, model, version, uri), data, digest, uri, signature, sig_uri)


def _check_own(signature: dict[str, Any], data: bytes, uri: str) -> None:
    """The signature document is whole, whoever signed it: an accepted key is asked for later, by the trust policy."""
    key = signature.get("key")
    if key:
        signing.verify(signature, (str(key),), kind="SIGNATURE", what="the release", where=uri)
        return
    expected = {k: signature.get(k) for k in ("format", "model", "version", "manifest")}
    if data != signing.unsigned(expected):
        raise DynamoBlobError(
            "REGISTRY-SIGNATURE-CORRUPT",
            "the signature is damaged",
            where=uri,
            why="fields that do not belong",
            do="restore it or publish anew",
        )


def parse_manifest(data: bytes, model: str, version: str, uri: str) -> Manifest:
    """The manifest in `data`, which must be canonical and of this release. Raises REGISTRY-MANIFEST-CORRUPT."""
    document = signing.parse(data, code="REGISTRY-MANIFEST-CORRUPT", what="the manifest", where=uri)
    try:
        if document.get("format") != FORMAT:
            raise ValueError(f"format {document.get('format')!r}, wanted {FORMAT}")
        manifest = Manifest.model_validate(document)
        if (manifest.model, manifest.version) != (model, version):
            raise ValueError(f"it is the manifest of {manifest.model} {manifest.version}")
        if manifest.range_bytes <= 0:
            raise ValueError("range_bytes must be positive")
        if manifest.weights_digest != weights_digest([f.blake3 for f in manifest.files]):
            raise ValueError("weights_digest does not fit the files")
        for f in manifest.files:
            if len(f.ranges) != -(-f.size // manifest.range_bytes):
                raise ValueError(f"{f.path}: {len(f.ranges)} range digests for {f.size} bytes")
            if problem := path_problem(f.path):
                raise ValueError(problem)
    except (ValueError, ValidationError) as e:
        raise DynamoBlobError(
            "REGISTRY-MANIFEST-CORRUPT", "the manifest is damaged", where=uri, why=str(e)[:300], do="publish anew"
        ) from None
    return manifest


def load_approval(
    account: Account, layout: Layout, stored: Stored, trust: TrustConfig, publisher: str, records: list[audit.Record]
) -> dict[str, Any]:
    """The valid approval of `stored`. Raises REGISTRY-UNAPPROVED or REGISTRY-APPROVAL-*."""
    model, version = stored.manifest.model, stored.manifest.version
    name = layout.approval(model, version)
    uri = account.uri(layout.approvals, name)
    data = _get(account, layout.approvals, name)
    if data is None:
        raise DynamoBlobError(
            "REGISTRY-UNAPPROVED",
            f"release {version} of {model} is not approved",
            where=uri,
            do=f"`dynamo release approve {model} {version}` by an approver",
        )

    def refuse(suffix: str, what: str, why: str, do: str) -> DynamoBlobError:
        return DynamoBlobError(f"REGISTRY-APPROVAL-{suffix}", what, where=uri, why=why, do=do)

    approval = signing.parse(data, code="REGISTRY-APPROVAL-CORRUPT", what="the approval", where=uri)
    if approval.get("format") != APPROVAL_FORMAT:
        raise refuse("CORRUPT", "the approval is damaged", f"format {approval.get('format')!r}", "approve again")
    key = signing.verify(approval, trust.approver_keys, kind="APPROVAL", what="the approval", where=uri)
    if key == publisher:
        raise refuse(
            "SELF",
            "the publisher approved its own release",
            f"key {key[:16]}…",
            "someone else must approve, with another key",
        )
    if (approval.get("model"), approval.get("version"), approval.get("manifest")) != (model, version, stored.digest):
        raise refuse(
            "MISMATCH", "the approval is for something else",
            f"it approves {approval.get('model')} {approval.get('version')} {approval.get('manifest')}, served would be {model} {version} {stored.digest}",
            "approve this release",
        )  # fmt: skip
    if any(c.get("result") not in ("pass", "allowed") for c in approval.get("checks", [{}])) or not approval.get(
        "checks"
    ):
        raise refuse("CORRUPT", "the approval lists a check that did not pass", "", "approve again")
    expires = str(approval.get("expires_at", ""))
    if expires and parse_time(expires) <= time.time():
        raise refuse(
            "EXPIRED", "the approval has expired", f"at {expires}", "approve again, after a look at what is new"
        )
    _check_latest([r for r in records if r.key in trust.approver_keys], approval, signing.digest(data), refuse, uri)
    return approval


def _check_latest(
    records: list[audit.Record], approval: dict[str, Any], digest: str, refuse: Callable[..., DynamoBlobError], uri: str
) -> None:
    """This very approval was intended, and no later one of the version is known to have taken effect."""
    of_version = [r for r in records if r.action == "approve" and r.version == approval["version"]]
    if not any(r.subject == digest for r in of_version):
        raise _unrecorded(uri, "this approval", len(records))
    later = [r for r in of_version if r.phase == "done" and approval_sequence(r) > int(approval.get("sequence", 0))]
    if later:
        raise refuse(
            "REPLAYED",
            "the approval is an older one that someone put back",
            f"record {later[-1].seq} ({later[-1].at}) replaced it",
            "approve again",
        )


def approval_sequence(record: audit.Record) -> int:
    """Number of the approval that `record` tells of, 0 for other records."""
    return int(record.detail.get("approval_sequence", 0))


def _unrecorded(uri: str, what: str, count: int) -> DynamoBlobError:
    return DynamoBlobError(
        "REGISTRY-AUDIT-UNRECORDED", f"the audit record does not know {what}", where=uri, why=f"{count} records of accepted keys, none of it",
        do="the record or the document was exchanged: do not serve before you know who did",
    )  # fmt: skip


def _check_signature(stored: Stored, trust: TrustConfig) -> str:
    return signing.verify(
        stored.signature, trust.publisher_keys, kind="SIGNATURE", what="the release", where=stored.signature_uri
    )


def _check_recorded(records: list[audit.Record], stored: Stored, trust: TrustConfig) -> None:
    if not any(
        r.action == "publish" and r.manifest == stored.digest and r.key in trust.publisher_keys for r in records
    ):
        raise _unrecorded(stored.uri, "this publication", len(records))


def channel_keys(trust: TrustConfig) -> tuple[str, ...]:
    """Keys whose signature on a channel `trust` accepts."""
    return trust.approver_keys if trust.require == "approval" else trust.approver_keys + trust.publisher_keys


def _record_read(account: Account, layout: Layout, stored: Stored, source: str, channel: Channel | None) -> bool:
    detail = {"resolved_from": source} | ({"channel_sequence": channel.sequence} if channel else {})
    try:
        audit.append(
            account, layout, model=stored.manifest.model, action="read", phase="done", version=stored.manifest.version, manifest=stored.digest,
            subject=channel.digest if channel else "", detail=detail, may_create=False, tries=_READ_TRIES,
        )  # fmt: skip
    except DynamoBlobError:
        return False  # the record is for people; not being able to write it must not stop serving
    return True


def refuse_tombstone(signature: bytes, model: str, version: str, uri: str) -> None:
    """Raises REGISTRY-VERSION-RETIRED if the bytes in the signature's place are a tombstone."""
    if TOMBSTONE_FORMAT.encode() in signature:
        raise DynamoBlobError(
            "REGISTRY-VERSION-RETIRED",
            f"release {version} of {model} was retired",
            where=uri,
            do="serve another version: `dynamo release list`",
        )


def _records(account: Account, layout: Layout, model: str) -> list[audit.Record]:
    records = audit.read(account, layout, model)
    if not records:
        raise DynamoBlobError(
            "REGISTRY-AUDIT-MISSING", f"there is no audit record of {model}", where=account.uri(layout.audit, f"audit/{model}/"),
            why="publishing and promoting leave one", do="publish the model, or, if it was, find out who removed the record",
        )  # fmt: skip
    return records


def _get(account: Account, container: str, name: str) -> bytes | None:
    try:
        return account.get(container, name)
    except StorageError as e:
        if e.code == "STORAGE-NOT-FOUND":
            return None
        raise


def parse_time(text: str) -> float:
    """Unix seconds of ``YYYY-MM-DDTHH:MM:SSZ``; 0 if it is not one (an expiry that cannot be read has passed)."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0
