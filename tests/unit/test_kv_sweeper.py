"""Journals, snapshot, listing and the sweeper, against a real Azurite."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common.kv.classes import Classes
from components.common.kv.journal import SharedIndex
from components.common.kv.store import JOURNAL_PREFIX, SNAPSHOT_OBJECT, Deleted, KvStore, Lease
from components.common.kv.sweeper import Sweeper, SweeperConfig
from components.common.messages.salt import tenant_hash
from components.common.messages.tenants import RetentionClass
from components.common.storage.account import Account
from tests.kv_azurite import KvAzurite, free_port, name

DAY = 86400.0


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvAzurite]:
    server = KvAzurite(tmp_path_factory.mktemp("azurite"), free_port(21600))
    yield server
    server.close()


@pytest.fixture
def store(azurite: KvAzurite, request: pytest.FixtureRequest) -> Iterator[KvStore]:
    account = Account(azurite.account)
    control = "kv" + hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    account.ensure_container(control)
    kv = KvStore(account, control)
    yield kv
    kv.close()
    account.close()


def config(azurite: KvAzurite, store: KvStore, **kwargs: object) -> SweeperConfig:
    return SweeperConfig(**{"account": azurite.account, "container": store.control, "lease_s": 15, **kwargs})  # type: ignore[arg-type]


def put(store: KvStore, blob: str, nbytes: int = 1000, container: str = "") -> None:
    store.account.put(container or store.control, blob, b"x" * nbytes)


def there(store: KvStore, container: str = "") -> set[str]:
    return {i.name for i in store.list(container or store.control) if not i.name.startswith("_")}


def index(store: KvStore, worker: str) -> SharedIndex:
    return SharedIndex(store, worker, capacity=1000)


def test_workers_learn_of_each_others_objects_and_absence(store: KvStore) -> None:
    a, b = index(store, "a"), index(store, "b")
    n1, n2 = name("acme", 1), name("acme", 2)
    a.note_put(n1, 10, "x", 1.0)
    assert b.lookup(n1) is None  # stale: a bounded miss
    a.sync()
    b.sync()
    assert b.lookup(n1) is True and b.lookup(n2) is None  # nobody listed yet: unknown, not absent
    a.note_gone(n1, "deleted")
    a.sync()
    b.sync()
    assert b.lookup(n1) is False


def test_a_snapshot_of_everything_makes_absence_known(azurite: KvAzurite, store: KvStore) -> None:
    put(store, name("acme", 1))
    sweeper = Sweeper(config(azurite, store), store, Classes.single(store.control))
    assert sweeper.run_once()
    fresh = index(store, "fresh")
    fresh.sync()
    assert fresh.lookup(name("acme", 1)) is True
    assert fresh.lookup(name("acme", 2)) is False
    sweeper.close()


def test_hits_in_journals_reach_the_sweeper_and_extend_life_up_to_the_cap(azurite: KvAzurite, store: KvStore) -> None:
    now = [time.time()]
    rule = RetentionClass(ttl_s=100, max_ttl_s=250, bytes=10**9)
    sweeper = Sweeper(config(azurite, store, relist_s=10**9), store, Classes({"x": rule}, "x", store.control))
    sweeper._clock = lambda: now[0]
    sweeper._forget()
    worker = SharedIndex(store, "w", capacity=100, clock=lambda: now[0])
    hit, cold = name("acme", "hit"), name("acme", "cold")
    for n in (hit, cold):
        put(store, n)
        worker.note_put(n, 1000, "x", 1.0)
    worker.sync()
    assert sweeper.run_once() and there(store) == {hit, cold}
    now[0] += 90
    worker.note_hit(hit)
    worker.sync()
    now[0] += 20  # 110 s after the put
    assert sweeper.run_once() and there(store) == {hit}
    for _ in range(2):
        now[0] += 60
        worker.note_hit(hit)
        worker.sync()
    assert sweeper.run_once() and there(store) == {hit}  # 230 s old: hits keep it
    now[0] += 25  # 255 s old, hit 25 s ago: the cap holds
    assert sweeper.run_once() and there(store) == set()
    sweeper.close()


def test_the_budget_holds_and_foreign_blobs_are_left_alone(azurite: KvAzurite, store: KvStore) -> None:
    rule = RetentionClass(ttl_s=DAY, max_ttl_s=DAY, bytes=5000)
    put(store, "notes/readme.txt")
    put(store, "0" * 32 + "/not-ours")
    worker = index(store, "w")
    for i in range(9):
        put(store, name("acme", i))
        worker.note_put(name("acme", i), 1000, "x", 1.0)
    for i in (2, 5):
        worker.note_hit(name("acme", i))
    worker.sync()
    sweeper = Sweeper(config(azurite, store), store, Classes({"x": rule}, "x", store.control))
    assert sweeper.run_once()
    left = there(store)
    assert len([n for n in left if n.startswith(tenant_hash("acme"))]) == 5
    assert {name("acme", 2), name("acme", 5), "notes/readme.txt", "0" * 32 + "/not-ours"} <= left
    assert sweeper.counters["deleted_budget"] == 4
    # one listing, one delete an object, and a handful of control requests (journals, purges, workers' notes)
    assert store.requests["delete"] == 4 and store.requests["list"] <= 7
    sweeper.close()


def test_classes_live_in_their_own_containers(azurite: KvAzurite, store: KvStore) -> None:
    other = store.control + "b"
    store.account.ensure_container(other)
    rules = {
        "a": RetentionClass(ttl_s=DAY, max_ttl_s=DAY, bytes=0),
        "b": RetentionClass(ttl_s=DAY, max_ttl_s=DAY, bytes=10**9, container=other),
    }
    put(store, name("acme", 1))
    put(store, name("acme", 2), container=other)
    sweeper = Sweeper(config(azurite, store), store, Classes(rules, "a", store.control))
    assert sweeper.run_once()
    assert there(store) == set() and there(store, other) == {name("acme", 2)}
    sweeper.close()


def test_a_listing_corrects_the_catalogue_in_both_directions(azurite: KvAzurite, store: KvStore) -> None:
    sweeper = Sweeper(config(azurite, store, relist_s=0.001), store, Classes.single(store.control))
    put(store, name("acme", 1))
    assert sweeper.run_once() and sweeper.catalogue.lookup(name("acme", 1)) is True
    store.account.delete(store.control, name("acme", 1))
    put(store, name("acme", 2))
    time.sleep(2.1)  # creation times are whole seconds: an object as young as the listing proves nothing by its absence
    assert sweeper.run_once()
    assert sweeper.catalogue.lookup(name("acme", 1)) is not True and sweeper.catalogue.lookup(name("acme", 2)) is True
    sweeper.close()


def test_objects_of_purged_generations_are_swept_by_name_alone(azurite: KvAzurite, store: KvStore) -> None:
    late, current = name("acme", 1, generation=0), name("acme", 1, generation=1)
    store.raise_epoch(tenant_hash("acme"))
    put(store, late)
    put(store, current)
    sweeper = Sweeper(config(azurite, store), store, Classes.single(store.control))
    assert sweeper.run_once() and there(store) == {current}
    assert sweeper.counters["deleted_purged"] == 1
    sweeper.close()


def test_what_a_purge_deleted_first_is_not_counted_as_swept(
    azurite: KvAzurite, store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.raise_epoch(tenant_hash("acme"))
    mine, theirs = name("acme", 1), name("acme", 2)
    put(store, mine)
    put(store, theirs)
    sweeper = Sweeper(config(azurite, store), store, Classes.single(store.control))
    delete = store.delete

    def late(container: str, names: Iterable[str], *more: Any) -> Deleted:
        if theirs in (listed := list(names)):
            store.account.delete(container, theirs)
        return delete(container, listed, *more)

    monkeypatch.setattr(store, "delete", late)
    assert sweeper.run_once() and there(store) == set()
    assert sweeper.counters["deleted_purged"] == 1
    assert sweeper.catalogue.lookup(theirs) is not True, "gone, whoever deleted it"
    sweeper.close()


def test_of_two_sweepers_one_works(azurite: KvAzurite, store: KvStore) -> None:
    put(store, name("acme", 1))
    one, two = (Sweeper(config(azurite, store), store, Classes.single(store.control)) for _ in range(2))
    assert one.run_once() and not two.run_once() and two.counters["standby"] == 1
    one.close()
    assert two.run_once() and not one.run_once()
    two.close()


def test_a_sweeper_that_lost_its_lease_deletes_nothing_more(
    azurite: KvAzurite, store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.common.kv.sweeper._BATCH", 4)
    for i in range(20):
        put(store, name("acme", i), 1)
    zero = Classes({"x": RetentionClass(ttl_s=DAY, max_ttl_s=DAY, bytes=0)}, "x", store.control)
    sweeper = Sweeper(config(azurite, store), store, zero)
    real = sweeper.lease.keep
    calls = iter([True] * 3)  # the listing renews once
    sweeper.lease.keep = lambda: next(calls, False) and real()  # type: ignore[method-assign]
    assert not sweeper.run_once()
    assert sweeper.counters["lease_lost"] == 1 and len(there(store)) == 12
    sweeper.close()


def test_after_kill_9_of_the_holder_another_takes_over(azurite: KvAzurite, store: KvStore, tmp_path: Path) -> None:
    put(store, name("acme", 1))
    plan = tmp_path / "sweeper.json"
    status = tmp_path / "status.json"
    plan.write_text(config(azurite, store, sweep_s=1, status_file=str(status)).model_dump_json())
    process = subprocess.Popen([sys.executable, "-m", "components.common.kv.sweeper", "--plan", str(plan)])
    try:
        deadline = time.monotonic() + 60
        while not status.exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        heir = Lease(store, 15)
        assert not heir.acquire()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        killed = time.monotonic()
        while not heir.acquire():
            assert time.monotonic() - killed < 20, "a lease of 15 s"
            time.sleep(0.3)
        heir.release()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_sigterm_ends_the_sweeper_and_gives_the_lease_back(azurite: KvAzurite, store: KvStore, tmp_path: Path) -> None:
    plan, status = tmp_path / "sweeper.json", tmp_path / "status.json"
    plan.write_text(config(azurite, store, sweep_s=1, status_file=str(status)).model_dump_json())
    process = subprocess.Popen([sys.executable, "-m", "components.common.kv.sweeper", "--plan", str(plan)])
    deadline = time.monotonic() + 60
    while not status.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(15) == 0
    heir = Lease(store, 15)
    assert heir.acquire()
    heir.release()


def test_journals_read_to_their_end_are_removed_and_never_read_twice(azurite: KvAzurite, store: KvStore) -> None:
    worker = index(store, "w")
    put(store, name("acme", 1))
    worker.note_put(name("acme", 1), 1000, "default", 1.0)
    worker.note_hit(name("acme", 1))
    worker.sync()
    sweeper = Sweeper(config(azurite, store, journal_keep_s=0.001), store, Classes.single(store.control))
    time.sleep(1.1)  # the service's times are whole seconds
    assert sweeper.run_once() and sweeper.run_once()
    assert list(store.list(store.control, JOURNAL_PREFIX)) == []
    sweeper.close()
    heir = Sweeper(config(azurite, store), store, Classes.single(store.control))
    assert heir.run_once()
    assert heir.catalogue.get(name("acme", 1)).hits == 1  # type: ignore[union-attr]
    heir.close()


def test_a_damaged_snapshot_or_journal_costs_knowledge_not_objects(azurite: KvAzurite, store: KvStore) -> None:
    put(store, name("acme", 1))
    store.write(SNAPSHOT_OBJECT, b"garbage")
    store.account.append_open(store.control, JOURNAL_PREFIX + "evil.log")
    store.account.append(
        store.control, JOURNAL_PREFIX + "evil.log", b"p x\nh\n\xff\xfe\nz\np a b c d e f\nhalf a li", at=0
    )
    sweeper = Sweeper(config(azurite, store), store, Classes.single(store.control))
    assert sweeper.run_once() and there(store) == {name("acme", 1)}
    assert sweeper.reader.bad_lines == 5
    fresh = index(store, "fresh")
    fresh.sync()
    assert fresh.lookup(name("acme", 1)) is True
    sweeper.close()
