"""The channel of a model: its only mutable name, moved by ETag compare-and-swap.

``channels/<model>.json`` is a signed document:

    sequence   counts every change, so that an older copy put back is recognised by the audit record
    current, previous   versions ("" = none)
    stack      versions as they followed each other, the last `STACK`; a rollback takes the last off
    retired    versions nobody may promote again
    history    [{sequence, action, version, manifest, at}], oldest first, the last `HISTORY` of them

Every change: an audit *intent* with the digest of the new document, the swap, an audit *done*. Of two
at once one wins; the other gets REGISTRY-CHANNEL-LOST. Promote, rollback and retire all pass through
this one blob, so none can overlook another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.registry import audit, signing
from components.common.registry.layout import Layout
from components.common.registry.signing import SigningKey
from components.common.storage.account import Account
from components.common.storage.errors import StorageError

FORMAT = "dynamo-blob.channel/1"
HISTORY = 200
STACK = 50


@dataclass(frozen=True)
class Channel:
    """One state of the channel, as read. `etag` is "" for a channel that does not exist yet."""

    model: str
    document: dict[str, Any]
    digest: str
    etag: str
    uri: str

    @property
    def sequence(self) -> int:
        return int(self.document["sequence"])

    @property
    def current(self) -> str:
        return str(self.document["current"])

    @property
    def previous(self) -> str:
        return str(self.document["previous"])

    @property
    def stack(self) -> tuple[str, ...]:
        return tuple(self.document["stack"])

    @property
    def retired(self) -> tuple[str, ...]:
        return tuple(self.document["retired"])

    def version_of(self, name: str) -> str:
        """Version under `name` (current or previous). Raises REGISTRY-CHANNEL-EMPTY."""
        version = {"current": self.current, "previous": self.previous}.get(name, "")
        if not version:
            raise DynamoBlobError(
                "REGISTRY-CHANNEL-EMPTY",
                f"channel '{name}' of {self.model} points at nothing",
                where=self.uri,
                do="promote a version, or name one in the graph",
            )
        return version

    def manifest_of(self, version: str) -> str:
        """Manifest digest with which `version` was last promoted; "" if history no longer tells."""
        found = [h["manifest"] for h in self.document["history"] if h["version"] == version]
        return str(found[-1]) if found else ""

    def check_trust(self, accepted: tuple[str, ...]) -> None:
        """Raises REGISTRY-CHANNEL-UNSIGNED, -UNKNOWN-KEY or -BAD-SIGNATURE."""
        signing.verify(self.document, accepted, kind="CHANNEL", what="the channel", where=self.uri)

    def check_history(self, records: list[audit.Record], accepted: tuple[str, ...]) -> None:
        """This very state was intended, and no later one is known to have been in effect, by records of `accepted` keys.

        Raises REGISTRY-CHANNEL-REPLAYED or REGISTRY-AUDIT-UNRECORDED.
        """
        records = [r for r in records if r.key in accepted]
        mine = [r for r in records if r.subject == self.digest and r.phase == "intent"]
        later = [r for r in records if r.phase == "done" and int(r.detail.get("channel_sequence", 0)) > self.sequence]
        if later:
            raise DynamoBlobError(
                "REGISTRY-CHANNEL-REPLAYED", "the channel is an older state that someone put back", where=self.uri,
                why=f"it is number {self.sequence}; number {later[-1].detail['channel_sequence']} was in effect at {later[-1].at} (audit record {later[-1].seq})",
                do="promote the version you want again, and find out who wrote to the channel",
            )  # fmt: skip
        if not mine:
            raise DynamoBlobError(
                "REGISTRY-AUDIT-UNRECORDED", "the audit record does not know this state of the channel", where=self.uri,
                why=f"number {self.sequence}, {len(records)} records", do="the record or the channel was exchanged: do not serve before you know who did",
            )  # fmt: skip


def read_channel(account: Account, layout: Layout, model: str) -> Channel | None:
    """The channel, None if there is none. Raises REGISTRY-CHANNEL-CORRUPT or -MISMATCH (another model's)."""
    name = layout.channel(model)
    uri = account.uri(layout.approvals, name)
    try:
        data, etag = account.get_with_etag(layout.approvals, name)
    except StorageError as e:
        if e.code == "STORAGE-NOT-FOUND":
            return None
        raise
    document = signing.parse(data, code="REGISTRY-CHANNEL-CORRUPT", what="the channel", where=uri)
    problem = _problem(document)
    if problem:
        raise DynamoBlobError(
            "REGISTRY-CHANNEL-CORRUPT",
            "the channel is damaged",
            where=uri,
            why=problem,
            do="promote the version you want again after removing it",
        )
    if document["model"] != model:
        raise DynamoBlobError(
            "REGISTRY-CHANNEL-MISMATCH",
            "the channel is that of another model",
            where=uri,
            why=f"it says {document['model']}",
            do="restore it",
        )
    return Channel(model, document, signing.digest(data), etag, uri)


def _problem(d: dict[str, Any]) -> str:
    if d.get("format") != FORMAT:
        return f"format {d.get('format')!r}"
    kinds = {
        "model": str,
        "current": str,
        "previous": str,
        "sequence": int,
        "retired": list,
        "stack": list,
        "history": list,
    }
    wrong = [k for k, t in kinds.items() if not isinstance(d.get(k), t)]
    if wrong:
        return f"field '{wrong[0]}' is missing or wrong"
    fields = {"sequence", "action", "version", "manifest", "at"}
    return "" if all(isinstance(h, dict) and h.keys() >= fields for h in d["history"]) else "history is malformed"


def swap(
    account: Account,
    layout: Layout,
    model: str,
    key: SigningKey | None,
    action: str,
    version: str,
    manifest: str,
    change: Callable[[Channel], dict[str, Any]],
) -> Channel:
    """Apply `change` (fields to replace; it may refuse by raising) to the channel; the new state.

    Raises REGISTRY-CHANNEL-LOST when someone else changed the channel meanwhile: nothing of this call took effect.
    """  # fmt: skip
    name = layout.channel(model)
    before = read_channel(account, layout, model) or _empty(account, layout, model)
    fields = change(before)
    sequence = before.sequence + 1
    entry = {"sequence": sequence, "action": action, "version": version, "manifest": manifest, "at": audit.now_iso()}
    body = {k: v for k, v in before.document.items() if k not in ("key", "signature")} | fields
    body |= {"sequence": sequence, "history": [*before.document["history"], entry][-HISTORY:]}
    data = key.sign(body) if key else signing.unsigned(body)
    digest = signing.digest(data)
    detail = {"channel_sequence": sequence, "current": body["current"], "previous": body["previous"]}

    def record(phase: str) -> None:
        audit.append(
            account,
            layout,
            model=model,
            action=action,
            phase=phase,
            version=version,
            manifest=manifest,
            subject=digest,
            key=key,
            detail=detail,
        )

    record("intent")
    try:
        if before.etag:
            etag = account.replace(layout.approvals, name, data, etag=before.etag)
        else:
            etag = account.create(layout.approvals, name, data)
    except StorageError as e:
        if e.code not in ("STORAGE-PRECONDITION", "STORAGE-CONFLICT", "STORAGE-NOT-FOUND"):
            raise
        now = read_channel(account, layout, model)
        if now is None or now.digest != digest:  # equal: our own retry met our own success
            raise DynamoBlobError(
                "REGISTRY-CHANNEL-LOST", f"someone else changed the channel of {model} first; nothing was done", where=before.uri,
                why=f"it was number {before.sequence}, now it is {now.sequence if now else 'gone'}"
                + (f" (current {now.current or 'none'})" if now else ""),
                do="look at `dynamo release list`, then try again if you still want to", current=now.current if now else "",
            ) from None  # fmt: skip
        etag = now.etag
    record("done")
    return Channel(
        model,
        signing.parse(data, code="REGISTRY-CHANNEL-CORRUPT", what="the channel", where=before.uri),
        digest,
        etag,
        before.uri,
    )


def _empty(account: Account, layout: Layout, model: str) -> Channel:
    document = {
        "format": FORMAT,
        "model": model,
        "sequence": 0,
        "current": "",
        "previous": "",
        "stack": [],
        "retired": [],
        "history": [],
    }
    return Channel(model, document, "", "", account.uri(layout.approvals, layout.channel(model)))


def refuse_retired(channel: Channel, version: str) -> None:
    """Raises REGISTRY-VERSION-RETIRED if `version` is retired."""
    if version in channel.retired:
        raise DynamoBlobError(
            "REGISTRY-VERSION-RETIRED",
            f"version {version} of {channel.model} is retired",
            where=channel.uri,
            do="publish it under a new version",
        )
