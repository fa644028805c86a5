"""The audit record: one chain whatever happens at the same time, and nothing in it changes unseen."""

from __future__ import annotations

import json
import threading

import pytest

from components.common.errors import DynamoBlobError
from components.common.registry import audit, signing
from components.common.registry.layout import Layout
from components.common.registry.manifest import canonical_json
from components.common.registry.signing import SigningKey
from tests.memory_account import Blobs, MemoryAccount
from tests.registry_store import Registry

LAYOUT, KEY = Layout("weights"), SigningKey.generate()


@pytest.fixture
def account() -> MemoryAccount:
    return MemoryAccount(Blobs({c: {} for c in LAYOUT.containers}))


def append(account: object, n: int, key: SigningKey | None = KEY, model: str = "m", layout: Layout = LAYOUT) -> None:
    audit.append(account, layout, model=model, action="note", phase="done", key=key, detail={"n": n})  # type: ignore[arg-type]


def read(account: object, layout: Layout = LAYOUT) -> list[int]:
    return [r.detail["n"] for r in audit.read(account, layout, "m") if r.action == "note"]  # type: ignore[arg-type]


def test_records_follow_each_other(account: MemoryAccount) -> None:
    for n in range(5):
        append(account, n, KEY if n % 2 else None)
    assert read(account) == [0, 1, 2, 3, 4]
    assert [r.seq for r in audit.read(account, LAYOUT, "m")] == [1, 2, 3, 4, 5]  # type: ignore[arg-type]
    assert audit.read(account, LAYOUT, "other") == []  # type: ignore[arg-type]


def test_four_writers_at_once_make_one_chain(registry: Registry) -> None:
    """On Azurite: every record is there once, the chain is whole."""
    append(registry.publisher, -1, layout=registry.layout)
    errors: list[BaseException] = []

    def work(who: int) -> None:
        try:
            for n in range(3):
                append(registry.publisher, who * 10 + n, None, layout=registry.layout)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(w,)) for w in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert sorted(read(registry.serving, registry.layout)) == sorted(
        [-1] + [w * 10 + n for w in range(4) for n in range(3)]
    )


def test_a_long_record_goes_on_in_the_next_log(account: MemoryAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_ROTATE", 2000)
    for n in range(20):
        append(account, n)
    logs = [i.name for i in account.list(LAYOUT.audit)]
    assert len(logs) >= 3 and logs[0] == "audit/m/000001.log" and read(account) == list(range(20))
    del account.blobs.containers[LAYOUT.audit][logs[1]]
    with pytest.raises(DynamoBlobError, match="REGISTRY-AUDIT-TAMPERED"):
        read(account)


def test_nobody_writes_after_the_seal(account: MemoryAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that listed before the seal cannot fork the chain: its append no longer fits and it goes to the next log."""
    append(account, 0)
    stale = account.head(LAYOUT.audit, "audit/m/000001.log").size
    monkeypatch.setattr(audit, "_ROTATE", 10)
    append(account, 1)
    with pytest.raises(DynamoBlobError, match="STORAGE-PRECONDITION"):
        account.append(LAYOUT.audit, "audit/m/000001.log", b"fork\n", at=stale)
    assert read(account) == [0, 1]


def test_a_crash_between_seal_and_next_log_is_survived(account: MemoryAccount) -> None:
    append(account, 0)
    audit.append(account, LAYOUT, model="m", action="seal", phase="done")  # type: ignore[arg-type]
    with pytest.raises(DynamoBlobError, match="REGISTRY-AUDIT-MISSING"):
        audit.append(account, LAYOUT, model="m", action="read", phase="done", may_create=False)  # type: ignore[arg-type]
    append(account, 1)
    assert read(account) == [0, 1]


def test_an_answer_that_was_lost_does_not_write_twice(account: MemoryAccount) -> None:
    """The append went through, its answer did not: the retry finds its own record."""
    real, calls = account.append, []

    def lossy(container: str, name: str, data: bytes, *, at: int) -> None:
        calls.append(at)
        real(container, name, data, at=at)
        if len(calls) == 1:
            real(container, name, data, at=at)  # what a transport's own retry does: 412

    account.append = lossy  # type: ignore[method-assign]
    append(account, 7)
    assert read(account) == [7]


def test_a_forged_past_is_seen(account: MemoryAccount) -> None:
    """Someone with write access rewrites a record and all digests after it, but has no key."""
    for n in range(3):
        append(account, n)
    log = account.blobs.containers[LAYOUT.audit]["audit/m/000001.log"]
    lines = log.data.splitlines(keepends=True)
    record = json.loads(lines[1]) | {"detail": {"n": 99}}
    lines[1] = canonical_json(record)
    third = json.loads(lines[2]) | {"prev": signing.digest(lines[1])}
    log.data = b"".join([lines[0], lines[1], canonical_json(third)])
    with pytest.raises(DynamoBlobError, match="REGISTRY-AUDIT-TAMPERED"):
        read(account)
