"""What there is: releases with their state, and what differs between two."""

from __future__ import annotations

import time
from typing import Any

from components.common.registry import signing
from components.common.registry.channel import Channel, read_channel
from components.common.registry.layout import Layout
from components.common.registry.manifest import canonical_json
from components.common.registry.publish import TOMBSTONE_FORMAT
from components.common.registry.release import Stored, load, parse_time
from components.common.registry.retire import manifests
from components.common.storage.account import Account
from components.common.storage.errors import StorageError


def list_releases(account: Account, layout: Layout, model: str = "") -> list[dict[str, Any]]:
    """One row per version, by model and publication order: model, version, state, channel, bytes, files, digest, publisher, approver, expires_at.

    state: incomplete, published, approved, expired, retired. Signatures are not judged here: `show` and `resolve` do.
    """
    rows, channels = [], {}
    for name, version, blob in manifests(account, layout):
        if model and name != model:
            continue
        if name not in channels:
            channels[name] = read_channel(account, layout, name)
        rows.append(_row(account, layout, name, version, blob, channels[name]))
    return sorted(rows, key=lambda r: (r["model"], r["published_at"], r["version"]))


def _row(
    account: Account, layout: Layout, model: str, version: str, blob: str, channel: Channel | None
) -> dict[str, Any]:
    manifest = signing.parse(
        account.get(layout.container, blob),
        code="REGISTRY-MANIFEST-CORRUPT",
        what="the manifest",
        where=account.uri(layout.container, blob),
    )
    signature = _document(account, layout.container, layout.signature(model, version))
    approval = _document(account, layout.approvals, layout.approval(model, version))
    if signature.get("format") == TOMBSTONE_FORMAT:
        state = "retired"
    elif not signature:
        state = "incomplete"
    elif approval:
        expires = str(approval.get("expires_at", ""))
        state = "expired" if expires and parse_time(expires) <= time.time() else "approved"
    else:
        state = "published"
    pointers = [k for k in ("current", "previous") if channel and getattr(channel, k) == version]
    return {
        "model": model, "version": version, "state": state, "channel": ",".join(pointers), "bytes": sum(f["size"] for f in manifest["files"]),
        "files": len(manifest["files"]), "digest": signing.digest(canonical_json(manifest)), "publisher": signature.get("key", ""),
        "published_at": signature.get("signed_at", ""), "approver": approval.get("key", ""), "approved_at": approval.get("approved_at", ""),
        "expires_at": approval.get("expires_at", ""),
    }  # fmt: skip


def _document(account: Account, container: str, name: str) -> dict[str, Any]:
    try:
        return signing.parse(
            account.get(container, name), code="REGISTRY-CORRUPT", what="a document", where=account.uri(container, name)
        )
    except StorageError as e:
        if e.code in ("STORAGE-NOT-FOUND", "STORAGE-NO-CONTAINER"):
            return {}
        raise


def diff(account: Account, layout: Layout, model: str, old: str, new: str) -> dict[str, Any]:
    """What a change from `old` to `new` means: files, tensors and provenance that differ, and bytes not shared."""
    a, b = load(account, layout, model, old).manifest, load(account, layout, model, new).manifest
    fa, fb = {f.path: f for f in a.files}, {f.path: f for f in b.files}
    ta, tb = {t.name: t for t in a.tensors}, {t.name: t for t in b.tensors}
    had = {f.blake3 for f in a.files}
    return {
        "model": model, "from": old, "to": new, "same_weights": a.weights_digest == b.weights_digest,
        "added": sorted(fb.keys() - fa.keys()), "removed": sorted(fa.keys() - fb.keys()),
        "changed": sorted(p for p in fa.keys() & fb.keys() if fa[p].blake3 != fb[p].blake3),
        "new_bytes": sum({f.blake3: f.size for f in b.files if f.blake3 not in had}.values()),
        "tensors_added": sorted(tb.keys() - ta.keys()), "tensors_removed": sorted(ta.keys() - tb.keys()),
        "tensors_reshaped": sorted(n for n in ta.keys() & tb.keys() if (ta[n].dtype, ta[n].shape) != (tb[n].dtype, tb[n].shape)),
        "provenance": {
            k: [a.provenance.get(k), b.provenance.get(k)] for k in sorted(a.provenance.keys() | b.provenance.keys())
            if a.provenance.get(k) != b.provenance.get(k)
        },
    }  # fmt: skip


def show(account: Account, layout: Layout, model: str, version: str) -> tuple[Stored, dict[str, Any]]:
    """The committed release and its approval document ({} without one)."""
    return load(account, layout, model, version), _document(account, layout.approvals, layout.approval(model, version))
