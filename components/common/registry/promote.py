"""Promote and roll back: what `current` means, changed by one compare-and-swap."""

from __future__ import annotations

from typing import Any

from components.common.errors import DynamoBlobError
from components.common.registry import audit
from components.common.registry.channel import STACK, Channel, read_channel, refuse_retired, swap
from components.common.registry.config import TrustConfig
from components.common.registry.layout import Layout, check_names
from components.common.registry.release import Stored, channel_keys, load, load_approval
from components.common.registry.signing import SigningKey, verify
from components.common.storage.account import Account


def promote(
    account: Account, layout: Layout, model: str, version: str, key: SigningKey | None, trust: TrustConfig
) -> Channel:
    """Make `version` current. Promoting what is current already changes nothing.

    Raises what `resolve` raises for a release that `trust` refuses, REGISTRY-VERSION-RETIRED, REGISTRY-CHANNEL-LOST,
    REGISTRY-CHANNEL-UNKNOWN-KEY for a `key` whose channel `trust` would refuse to serve.
    """
    check_names(model, version)
    stored = load(account, layout, model, version)
    _prove(account, layout, stored, trust)
    _accepted(account, layout, model, key, trust)
    before = read_channel(account, layout, model)
    served = before and (trust.require == "none" or before.document.get("key") in channel_keys(trust))
    if before and served and before.current == version and before.manifest_of(version) == stored.digest:
        return before  # one that serving refuses for its key is signed anew

    def change(channel: Channel) -> dict[str, Any]:
        refuse_retired(channel, version)
        return _stacked([*channel.stack, version])

    return swap(account, layout, model, key, "promote", version, stored.digest, change)


def rollback(
    account: Account, layout: Layout, model: str, key: SigningKey | None, trust: TrustConfig | None = None
) -> Channel:
    """Make current what was current before; again, and it goes one further back.

    trust   when given, a version that serving would refuse by now (an approval that has expired) is refused here,
            not at the next start.

    Raises REGISTRY-CHANNEL-EMPTY, REGISTRY-CHANNEL-LOST, and what `promote` raises for `trust`.
    """
    check_names(model)
    channel = read_channel(account, layout, model)
    if channel is None or not channel.previous:
        raise DynamoBlobError(
            "REGISTRY-CHANNEL-EMPTY", f"there is no previous version of {model} to go back to",
            where=account.uri(layout.approvals, layout.channel(model)), do="promote the version you want",
        )  # fmt: skip
    target = channel.previous
    stored = load(account, layout, model, target)
    if trust:
        _prove(account, layout, stored, trust)
        _accepted(account, layout, model, key, trust)

    def change(now: Channel) -> dict[str, Any]:
        if now.etag != channel.etag:
            raise DynamoBlobError("REGISTRY-CHANNEL-LOST", f"someone else changed the channel of {model} first; nothing was done", where=now.uri, do="look at `dynamo release list`, then try again", current=now.current)  # fmt: skip
        return _stacked(list(now.stack[:-1]))

    return swap(account, layout, model, key, "rollback", target, stored.digest, change)


def _prove(account: Account, layout: Layout, stored: Stored, trust: TrustConfig) -> None:
    if trust.require == "none":
        return
    publisher = verify(
        stored.signature, trust.publisher_keys, kind="SIGNATURE", what="the release", where=stored.signature_uri
    )
    if trust.require == "approval":
        records = audit.read(account, layout, stored.manifest.model)
        load_approval(account, layout, stored, trust, publisher, records)


def _accepted(account: Account, layout: Layout, model: str, key: SigningKey | None, trust: TrustConfig) -> None:
    accepted = channel_keys(trust)
    if trust.require != "none" and (key is None or key.public not in accepted):
        raise DynamoBlobError(
            "REGISTRY-CHANNEL-UNKNOWN-KEY", "serving would refuse a channel signed by this key; nothing was done",
            where=account.uri(layout.approvals, layout.channel(model)),
            why=f"key {key.public[:16] + '…' if key else '(none)'}, accepted: {', '.join(k[:16] + '…' for k in accepted) or 'none'}",
            do="sign with an accepted approver's key, or name this one in --approver-key and in the `trust` of the graphs",
        )  # fmt: skip


def _stacked(stack: list[str]) -> dict[str, Any]:
    kept = [v for i, v in enumerate(stack) if i == 0 or v != stack[i - 1]][-STACK:]
    return {"stack": kept, "current": kept[-1] if kept else "", "previous": kept[-2] if len(kept) > 1 else ""}
