"""Purge generations that were lost, truncated or put back: they never go back, and what cannot be known gives no hit."""

from __future__ import annotations

import json

import pytest

from components.common.errors import DynamoBlobError
from components.common.kv.classes import Classes
from components.common.kv.epochs import EPOCHS_OBJECT, FORMAT, Epochs, scoped
from components.common.kv.purge import Purge, PurgeConfig
from components.common.kv.store import PURGE_PREFIX, KvStore
from components.common.kv.sweeper import Sweeper, SweeperConfig
from components.common.messages.salt import tenant_hash
from components.common.messages.tenants import RetentionClass
from components.common.registry.signing import SigningKey
from tests import kv_azurite
from tests.kv_azurite import NAMESPACE, name

COPY = "_control/epochs.copy.json"
ACME, OTHER = tenant_hash("acme"), tenant_hash("other")
DAMAGES = {
    "lost": None, "empty": b"", "truncated": b'{"format": "dynamo-blob.epochs/1", "generat', "no object": b"[]",
    "null": b"null", "no format": b"{}", "deep": b"[" * 100_000, "not text": b"\xff\xfe",
    "infinite": b'{"format": "dynamo-blob.epochs/1", "generations": {"%s": Infinity}}' % ACME.encode(),
    "negative": b'{"format": "dynamo-blob.epochs/1", "generations": {"%s": -1}}' % ACME.encode(),
    "huge": b'{"format": "dynamo-blob.epochs/1", "generations": {"%s": 4294967296}}' % ACME.encode(),
    "no tenant": b'{"format": "dynamo-blob.epochs/1", "generations": {"acme": 3}}',
}  # fmt: skip


store = kv_azurite.kv_store


def damage(store: KvStore, blob: str, how: str) -> None:
    body = DAMAGES[how]
    if body is None:
        store.delete(store.control, [blob])
    else:
        store.write(blob, body)


def body(store: KvStore, blob: str) -> dict[str, int]:
    raw, _ = store.read(blob)
    return dict(json.loads(raw or b"")["generations"])


def purge(store: KvStore, tenant: str = "acme") -> int:
    plan = PurgeConfig(
        account=store.account.config, control=store.control, containers=(store.control,), tenant=tenant, settle_s=0
    )
    return int(Purge(plan, store, SigningKey.generate()).run()["generation"])


def purged(store: KvStore, generation: int) -> None:
    """What a purge of acme left behind, without the purge."""
    store.raise_epoch(ACME, at_least=generation)
    store.write(f"{PURGE_PREFIX}{ACME}.json", json.dumps({"tenant": ACME, "generation": generation}).encode())
    left = {"tenant": "acme", "tenant_hash": ACME, "generation": generation}
    store.write(f"{PURGE_PREFIX}{'f' * 32}.report.json", json.dumps(left).encode())


def sweeper(store: KvStore) -> Sweeper:
    rule = RetentionClass(ttl_s=86400, max_ttl_s=86400, bytes=0)
    config = SweeperConfig(account=store.account.config, container=store.control, lease_s=15)
    return Sweeper(config, store, Classes({"x": rule}, "x", store.control))


@pytest.mark.parametrize("how", DAMAGES)
def test_whoever_reads_next_restores_them_from_the_copy(store: KvStore, how: str) -> None:
    for _ in range(3):
        store.raise_epoch(ACME)
    store.raise_epoch(OTHER)
    damage(store, EPOCHS_OBJECT, how)
    fresh = Epochs(store.read_epochs, refresh_s=1, stale_s=60)
    assert fresh.refresh() and fresh.scope(ACME, NAMESPACE) == scoped(NAMESPACE, 3)
    assert body(store, EPOCHS_OBJECT) == body(store, COPY) == {ACME: 3, OTHER: 1}
    assert store.raise_epoch(ACME) == 4


@pytest.mark.parametrize("how", ["lost", "truncated"])
def test_without_a_copy_the_purges_say_how_far_they_went(store: KvStore, how: str) -> None:
    purged(store, 2)
    damage(store, EPOCHS_OBJECT, how)
    damage(store, COPY, how)
    assert store.read_epochs()[ACME] > 2, "past what purges at the same time may have raised"
    assert OTHER not in store.read_epochs()


def test_a_report_stands_in_for_a_lost_state(store: KvStore) -> None:
    assert purge(store) == 1  # a real one: what is read is what it writes
    for lost in (EPOCHS_OBJECT, COPY, f"{PURGE_PREFIX}{ACME}.json"):
        damage(store, lost, "lost")
    assert store.read_epochs()[ACME] > 1


def test_what_cannot_be_known_gives_no_hit_no_put_and_no_purge(store: KvStore) -> None:
    purged(store, 1)
    for bad in (EPOCHS_OBJECT, COPY, f"{PURGE_PREFIX}{ACME}.json"):
        damage(store, bad, "truncated")
    epochs = Epochs(store.read_epochs, refresh_s=1, stale_s=60)
    assert not epochs.refresh() and "KV-EPOCHS-INVALID" in epochs.last_error
    assert epochs.scope(ACME, NAMESPACE) is None and epochs.scope(OTHER, NAMESPACE) is None
    with pytest.raises(DynamoBlobError, match="KV-EPOCHS-INVALID") as e:
        purge(store, "other")
    assert PURGE_PREFIX in e.value.why and "restore" in e.value.do
    store.write(COPY, json.dumps({"format": FORMAT, "generations": {ACME: 1}}).encode())  # what the operator is told
    assert epochs.refresh() and epochs.scope(ACME, NAMESPACE) == scoped(NAMESPACE, 1)


def test_another_versions_generations_are_not_replaced(store: KvStore) -> None:
    store.raise_epoch(ACME)
    newer = b'{"format": "dynamo-blob.epochs/2", "generations": []}'
    store.write(EPOCHS_OBJECT, newer)
    with pytest.raises(DynamoBlobError, match="KV-EPOCHS-INVALID"):
        store.read_epochs()
    assert store.read(EPOCHS_OBJECT)[0] == newer


def test_the_sweeper_raises_again_what_was_put_back_and_makes_the_copy(store: KvStore) -> None:
    one = sweeper(store)
    store.raise_epoch(ACME)
    before, _ = store.read(EPOCHS_OBJECT)
    store.raise_epoch(ACME)
    store.write(EPOCHS_OBJECT, before or b"")  # an operator's backup
    late, current = name("acme", 1, generation=1), name("acme", 1, generation=2)
    store.account.put(store.control, late, b"x")
    assert one.run_once() and store.read_epochs() == {ACME: 2} and one.counters["deleted_purged"] == 1
    damage(store, COPY, "lost")
    assert one.run_once() and body(store, COPY) == {ACME: 2}
    one.close()
    assert current not in [i.name for i in store.list(store.control)]


def test_the_sweeper_goes_on_with_the_rest_and_says_so(store: KvStore) -> None:
    purged(store, 1)
    for bad in (EPOCHS_OBJECT, COPY, f"{PURGE_PREFIX}{ACME}.json"):
        damage(store, bad, "truncated")
    over, late = name("other", 1), name("acme", 1)
    for blob in (over, late):
        store.account.put(store.control, blob, b"x" * 100)
    one = sweeper(store)
    assert one.run_once(), "a budget of 0: everything goes, by its budget"
    assert one.counters["deleted_budget"] == 2 and one.counters["deleted_purged"] == 0
    assert one.values()["generations_unknown"] == 1 and "KV-EPOCHS-INVALID" in one.problems["generations"]
    store.write(COPY, json.dumps({"format": FORMAT, "generations": {ACME: 1}}).encode())
    store.account.put(store.control, late, b"x")
    assert one.run_once() and one.values()["generations_unknown"] == 0 and not one.problems
    one.close()
