"""The record of who did what to a model: append-only, one hash chain per model.

Each line of ``audit/<model>/<number>.log`` (append blobs; Azure can enforce append-only by policy) is a
canonical JSON record. `prev` is the digest of the line before, `digest` that of the record itself;
control actions are signed. Every change is recorded twice: an *intent* before the write that makes it
visible and a *done* after it, so that a crash between any two writes leaves a state that explains
itself: an intent without its effect is an attempt, an effect without its intent is tampering.

Appending uses the blob's length as the condition, so two writers never fork the chain.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.registry import signing
from components.common.registry.layout import Layout
from components.common.registry.manifest import canonical_json
from components.common.registry.signing import SigningKey
from components.common.storage.account import Account
from components.common.storage.errors import StorageError

FORMAT = "dynamo-blob.audit/1"
_TRIES = 40
_TAIL = 64 * 2**10  # a record is far smaller
_ROTATE = 8 * 2**20  # bytes after which a control action opens the next log; Azure allows 50,000 appends per blob
_ROOT = "0" * 64


@dataclass(frozen=True)
class Record:
    """One verified line. `where` is ``<uri>#<line>``."""

    seq: int
    action: str
    phase: str
    model: str
    version: str
    manifest: str
    subject: str
    at: str
    identity: str
    key: str
    detail: dict[str, Any]
    digest: str
    where: str


def now_iso() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class _Tail:
    """Where the next record goes: log name, its size, and what the record must continue."""

    name: str
    size: int
    seq: int
    prev: str
    last: bytes


def append(
    account: Account,
    layout: Layout,
    *,
    model: str,
    action: str,
    phase: str,
    version: str = "",
    manifest: str = "",
    subject: str = "",
    key: SigningKey | None = None,
    detail: dict[str, Any] | None = None,
    may_create: bool = True,
    tries: int = _TRIES,
) -> dict[str, Any]:
    """Add one record and return it. Raises REGISTRY-AUDIT-CONTENTION after bounded tries.

    subject  digest of what the action writes (approval, channel), so that exactly that can be found later.
    """
    base = {
        "format": FORMAT, "action": action, "phase": phase, "model": model, "version": version, "manifest": manifest, "subject": subject,
        "at": now_iso(), "identity": account.identity, "detail": detail or {}, "nonce": f"{random.getrandbits(64):016x}",
    }  # fmt: skip
    last: StorageError | None = None
    for attempt in range(tries):
        tail = _tail(account, layout, model, may_create)
        if may_create and tail.size > _ROTATE and action != "seal":
            append(account, layout, model=model, action="seal", phase="done")
            continue
        body = base | {"seq": tail.seq + 1, "prev": tail.prev}
        line = key.sign(body) if key else canonical_json(_with_check(body | {"key": "", "signature": ""}))
        record: dict[str, Any] = json.loads(line)
        try:
            account.append(layout.audit, tail.name, line, at=tail.size)
            return record
        except StorageError as e:
            if e.code not in ("STORAGE-PRECONDITION", "STORAGE-CONFLICT"):
                raise
            last = e
        if line == _tail(account, layout, model, may_create).last:  # our own retry met our own success
            return record
        time.sleep(random.uniform(0, min(0.5, 0.01 * 2**attempt)))
    raise DynamoBlobError(
        "REGISTRY-AUDIT-CONTENTION", "the audit record of the model is written by too many at once", where=layout.audit_log(model, 1),
        why=f"{tries} tries; last: {last.code if last else ''}", do="try again",
    )  # fmt: skip


def read(account: Account, layout: Layout, model: str) -> list[Record]:
    """All records of `model`, the chain verified. Raises REGISTRY-AUDIT-TAMPERED or REGISTRY-AUDIT-MISSING."""
    logs = _logs(account, layout, model)
    out: list[Record] = []
    prev = _ROOT
    for index, (number, _) in enumerate(logs):
        name = layout.audit_log(model, number)
        where = account.uri(layout.audit, name)
        if number != index + 1:
            raise tampered(f"{where}", f"log {index + 1} is missing")
        data = account.get(layout.audit, name)
        if data and not data.endswith(b"\n"):
            raise tampered(where, "it ends in the middle of a record")
        for n, line in enumerate(data.splitlines(keepends=True), 1):
            record = _check(line, f"{where}#{n}", prev, len(out) + 1, model)
            out.append(record)
            prev = record.digest
    return out


def tampered(where: str, why: str) -> DynamoBlobError:
    return DynamoBlobError(
        "REGISTRY-AUDIT-TAMPERED", "the audit record was changed", where=where, why=why,
        do="do not serve from this registry before you know who did; the storage account's own logs tell",
    )  # fmt: skip


def _check(line: bytes, where: str, prev: str, seq: int, model: str) -> Record:
    try:
        r = signing.parse(line, code="REGISTRY-AUDIT-TAMPERED", what="an audit record", where=where)
        if r["format"] != FORMAT or r["model"] != model or r["seq"] != seq:
            raise tampered(where, f"record {seq} of {model} expected, found {r['seq']} of {r['model']}")
        if r["prev"] != prev:
            raise tampered(where, f"it continues {r['prev'][:16]}…, the record before is {prev[:16]}…")
        if r["key"]:
            signing.verify(r, (r["key"],), kind="AUDIT", what="an audit record", where=where)
        elif r["signature"] or r != _with_check(r):
            raise tampered(where, "its own digest does not fit")
        return Record(
            seq=seq, action=r["action"], phase=r["phase"], model=model, version=r["version"], manifest=r["manifest"], subject=r["subject"],
            at=r["at"], identity=r["identity"], key=r["key"], detail=r["detail"], digest=signing.digest(line), where=where,
        )  # fmt: skip
    except DynamoBlobError as e:
        raise tampered(where, e.why or e.what) from None
    except (KeyError, TypeError, AttributeError) as e:
        raise tampered(where, f"a field is missing or wrong: {e}") from None


def _with_check(r: dict[str, Any]) -> dict[str, Any]:
    """`r` with the digest of its other fields: what an unsigned record has instead of a signature."""
    body = {k: v for k, v in r.items() if k != "check"}
    return body | {"check": signing.digest(canonical_json(body))}


def _logs(account: Account, layout: Layout, model: str) -> list[tuple[int, int]]:
    """(number, size) of the logs of `model`, in order."""
    prefix = f"audit/{model}/"
    found = []
    for info in account.list(layout.audit, prefix):
        rest = info.name[len(prefix) :]
        if rest.endswith(".log") and rest[:-4].isdigit():
            found.append((int(rest[:-4]), info.size))
    return sorted(found)


def _tail(account: Account, layout: Layout, model: str, may_create: bool) -> _Tail:
    """Where to append. A log closed by a *seal* record is followed by the next, created if `may_create`.

    The seal is what keeps the chain whole: nobody can append after it, whatever they listed before.
    """
    logs = _logs(account, layout, model)
    if not logs:
        return _new_log(account, layout, model, 1, may_create)
    number, size = logs[-1]
    name = layout.audit_log(model, number)
    if size == 0 and number == 1:
        return _Tail(name, 0, 0, _ROOT, b"")
    source, length = (number, size) if size else (number - 1, logs[-2][1])
    at = layout.audit_log(model, source)
    data = account.get(layout.audit, at, max(0, length - _TAIL), min(length, _TAIL))
    last = data[data.rstrip(b"\n").rfind(b"\n") + 1 :]
    r = signing.parse(
        last, code="REGISTRY-AUDIT-TAMPERED", what="the last audit record", where=account.uri(layout.audit, at)
    )
    if size and r.get("action") == "seal":
        new = _new_log(account, layout, model, number + 1, may_create)
        return _Tail(new.name, 0, int(r["seq"]), signing.digest(last), b"")
    return _Tail(name, size, int(r["seq"]), signing.digest(last), last if size else b"")


def _new_log(account: Account, layout: Layout, model: str, number: int, may_create: bool) -> _Tail:
    if not may_create:
        raise _no_log(account, layout, model)
    account.append_open(layout.audit, layout.audit_log(model, number))
    return _Tail(layout.audit_log(model, number), 0, 0, _ROOT, b"")


def _no_log(account: Account, layout: Layout, model: str) -> DynamoBlobError:
    return DynamoBlobError(
        "REGISTRY-AUDIT-MISSING", "the model has no audit record to append to", where=account.uri(layout.audit, f"audit/{model}/"),
        do="the publisher's next action creates it; if there was one, it was removed: do not serve",
    )  # fmt: skip
