"""Approval: a second person's key under the results of the named checks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.registry import audit, signing
from components.common.registry.checks import Check, run_checks
from components.common.registry.layout import Layout, check_names
from components.common.registry.progress import Report
from components.common.registry.release import APPROVAL_FORMAT, approval_sequence, load
from components.common.registry.signing import SigningKey
from components.common.storage.account import Account
from components.common.storage.errors import StorageError

DAYS = 365.0


@dataclass(frozen=True)
class Approved:
    document: dict[str, Any]
    digest: str
    uri: str
    checks: tuple[Check, ...]


def approve(
    account: Account,
    layout: Layout,
    model: str,
    version: str,
    key: SigningKey,
    *,
    publisher_keys: tuple[str, ...] = (),
    approver_keys: tuple[str, ...] = (),
    allow: tuple[str, ...] = (),
    scanner: str = "",
    days: float = DAYS,
    progress: Report | None = None,
) -> Approved:
    """Run the checks on `model` `version` and sign their results with `key`.

    publisher_keys  accepted publishers; empty accepts whoever signed, as long as the signature fits and the key is another.
    approver_keys   accepted approvers; empty accepts `key`. One that serving refuses must not replace an approval it accepts.
    allow           exceptions by name (``remote-code``).
    days            validity; afterwards serving refuses until someone approves again.

    Raises REGISTRY-APPROVAL-SELF, REGISTRY-APPROVAL-UNKNOWN-KEY, REGISTRY-CHECK-FAILED (naming the checks), REGISTRY-SIGNATURE-*, REGISTRY-APPROVAL-LOST.
    """  # fmt: skip
    check_names(model, version)
    stored = load(account, layout, model, version)
    accepted = publisher_keys or (str(stored.signature.get("key") or ""),)
    publisher = signing.verify(
        stored.signature, accepted, kind="SIGNATURE", what="the release", where=stored.signature_uri
    )
    name = layout.approval(model, version)
    uri = account.uri(layout.approvals, name)
    if publisher == key.public:
        raise DynamoBlobError(
            "REGISTRY-APPROVAL-SELF",
            "the publisher cannot approve its own release",
            where=uri,
            do="someone else must approve, with another key",
        )
    if approver_keys and key.public not in approver_keys:
        raise DynamoBlobError(
            "REGISTRY-APPROVAL-UNKNOWN-KEY", "serving would refuse an approval by this key; nothing was done", where=uri,
            why=f"key {key.public[:16]}…, accepted: {', '.join(k[:16] + '…' for k in approver_keys)}",
            do="sign with an accepted approver's key, or name this one in --approver-key and in the `trust` of the graphs",
        )  # fmt: skip
    checks = run_checks(account, layout, stored.manifest, allow=allow, scanner=scanner, progress=progress)
    failed = [c for c in checks if not c.ok]
    if failed:
        raise DynamoBlobError(
            "REGISTRY-CHECK-FAILED", f"release {version} of {model} did not pass: {', '.join(c.name for c in failed)}", where=stored.uri,
            why="; ".join(f"{c.name}: {c.detail}" for c in failed), do="publish a corrected version, or allow by name what may be allowed",
            checks=[c.as_json() for c in checks],
        )  # fmt: skip
    before = account.find(layout.approvals, name)
    sequence = 1 + max(
        (approval_sequence(r) for r in audit.read(account, layout, model) if r.version == version), default=0
    )
    now = time.time()
    document = {
        "format": APPROVAL_FORMAT, "model": model, "version": version, "manifest": stored.digest, "publisher": publisher,
        "checks": [c.as_json() for c in checks], "allowed": sorted(allow), "approved_at": _iso(now), "expires_at": _iso(now + days * 86400),
        "identity": account.identity, "sequence": sequence,
    }  # fmt: skip
    data = key.sign(document)
    digest = signing.digest(data)

    def record(phase: str) -> None:
        audit.append(
            account, layout, model=model, action="approve", phase=phase, version=version, manifest=stored.digest, subject=digest, key=key,
            detail={"approval_sequence": sequence},
        )  # fmt: skip

    record("intent")
    try:
        if before:
            account.replace(layout.approvals, name, data, etag=before.etag)
        else:
            account.create(layout.approvals, name, data)
    except StorageError as e:
        if e.code not in ("STORAGE-PRECONDITION", "STORAGE-CONFLICT", "STORAGE-NOT-FOUND"):
            raise
        if signing.digest(account.get(layout.approvals, name)) != digest:
            raise DynamoBlobError(
                "REGISTRY-APPROVAL-LOST", "someone else approved the release at the same time; theirs counts", where=uri, do="look at `dynamo release show`",
            ) from None  # fmt: skip
    record("done")
    return Approved(document | {"key": key.public}, digest, uri, tuple(checks))


def _iso(t: float) -> str:
    return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
