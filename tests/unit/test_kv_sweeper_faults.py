"""What must not stop a sweeper: bad records, clocks that are off, a snapshot nobody lets it write. And what must: a lost lease."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common.kv.catalogue import Catalogue, Entry
from components.common.kv.classes import Classes
from components.common.kv.containers import COPY_OBJECT, FORMAT, remember
from components.common.kv.fence import Fence, asked
from components.common.kv.journal import JournalReader, SharedIndex
from components.common.kv.snapshot import decode, encode
from components.common.kv.store import (
    CONTAINERS_OBJECT,
    JOURNAL_PREFIX,
    LOCK_OBJECT,
    SNAPSHOT_OBJECT,
    WORKERS_PREFIX,
    KvStore,
)
from components.common.kv.sweeper import Sweeper, SweeperConfig, run
from components.common.kv.sweeper_ops import State
from components.common.messages.salt import tenant_hash
from components.common.messages.tenants import RetentionClass
from components.common.storage.errors import StorageError
from tests import kv_azurite
from tests.kv_azurite import name

HOUR, DAY = 3600.0, 86400.0
RULE = RetentionClass(ttl_s=HOUR, max_ttl_s=2 * HOUR, bytes=10**9)


store = kv_azurite.kv_store


@pytest.fixture
def sweepers(store: KvStore) -> Iterator[Any]:
    """sweepers(**config) -> Sweeper; its lease is given back."""
    made: list[Sweeper] = []

    def new(rule: RetentionClass = RULE, **more: Any) -> Sweeper:
        config = SweeperConfig(account=store.account.config, container=store.control, lease_s=15, **more)
        made.append(Sweeper(config, store, Classes({"x": rule}, "x", store.control)))
        return made[-1]

    yield new
    for one in made:
        one.close()


def put(store: KvStore, *numbers: int | str) -> None:
    for n in numbers:
        store.account.put(store.control, name("acme", n), b"x" * 100)


def there(store: KvStore) -> set[str]:
    return {i.name for i in store.list(store.control) if not i.name.startswith("_")}


def journal(store: KvStore, *lines: str, worker: str = "evil") -> str:
    blob = f"{JOURNAL_PREFIX}{worker}.log"
    store.account.append_open(store.control, blob)
    size = store.account.head(store.control, blob).size
    store.account.append(store.control, blob, ("\n".join(lines) + "\n").encode(), at=size)
    return blob


N = name("acme", 1)
BAD = {
    "infinite time of a put": f"p {N} 100 x 1.0 - inf", "infinite time of a hit": f"h {N} inf", "no time": f"h {N} nan",
    "time before time": f"p {N} 100 x 1.0 - -5", "negative bytes": f"p {N} -100 x 1.0 - 5", "too many bytes": f"p {N} {10**30} x 1.0 - 5",
    "bytes that are no number": f"p {N} 1e3 x 1.0 - 5", "infinite gain": f"p {N} 100 x inf - 5", "gain that is none": f"p {N} 100 x nan - 5",
    "a class of another shape": f"p {N} 100 x/../y 1.0 - 5", "a parent that is no object": f"p {N} 100 x 1.0 -{'f' * 64} 5",
    "a parent below zero": f"p {N} 100 x 1.0 {'-' + 'f' * 63} 5", "an infinite loss": f"g {N} gone inf", "no object": "h notes.txt 5",
    "fields missing": f"p {N}", "no record": "hello", "nothing": "", "another version": f"q {N} 5",
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_line_costs_itself(store: KvStore, what: str, caplog: pytest.LogCaptureFixture) -> None:
    catalogue = Catalogue(100)
    reader = JournalReader(store, catalogue)
    now = f"{time.time():.3f}"
    blob = journal(store, BAD[what], f"p {N} 100 x 1.0 - {now}", BAD[what], f"h {N} {now}")
    assert reader.read() == 4 and reader.bad_lines == 2
    assert catalogue.get(N).hits == 1 and catalogue.bytes == 100  # type: ignore[union-attr]
    catalogue.check_integrity()
    told = [r.getMessage() for r in caplog.records if "KV-JOURNAL-LINE" in r.getMessage()]
    assert len(told) == 1 and blob in told[0] and "line 0 from byte 0" in told[0]


def test_a_line_without_end_is_skipped_in_bounded_memory(store: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.common.kv.journal._PIECE_BYTES", 1024)
    catalogue = Catalogue(100)
    reader = JournalReader(store, catalogue)
    journal(store, "z" * 5000, *(f"p {name('acme', i)} 100 x 1.0 - {time.time():.3f}" for i in range(40)))
    reader.read()
    assert len(catalogue) == 40 and reader.bad_lines == 5 and reader.read() == 0


def test_numbers_that_cannot_be_leave_the_catalogue_sound() -> None:
    c = Catalogue(600)
    for i, bad in enumerate((-1, 2**70, float("inf"), float("nan"))):
        c.add(Entry(name("acme", i), bad, "x", bad, bad, bad, bad, 0, bad))  # type: ignore[arg-type]
        c.add(Entry(name("acme", i), bad, "x", bad, bad, bad, bad, 0, bad))  # type: ignore[arg-type]
    for i in range(300):  # more classes than a column has room for
        c.add(Entry(name("acme", 100 + i), 1, f"c{i}", 1, 1, 0, 0.0, 2**64 + i))
    assert len(c) == 304 and all(e.saves >= 0 and e.saves < 1e9 for e in c.entries())
    assert c.get(name("acme", 399)).cls == "", "the default class, whatever it is called"  # type: ignore[union-attr]
    c.check_integrity()
    assert decode(encode(c.entries(), {}, True)) is not None


@pytest.mark.parametrize(
    "head", [b"[]", b'{"offsets": [], "complete": 1}', b'{"offsets": {"a": null}, "complete": 1}', b"[" * 9999]
)
def test_a_snapshot_of_another_making_is_none(head: bytes) -> None:
    import zlib

    from blake3 import blake3

    body = zlib.compress(head + b"\n")
    assert decode(b"dynamo-blob.catalogue/1\n" + blake3(body).digest() + body) is None


@pytest.mark.parametrize("off_s", [-5 * HOUR, 5 * HOUR, -40 * 365 * DAY, 10**9])
def test_a_workers_clock_decides_neither_death_nor_life(store: KvStore, sweepers: Any, off_s: float) -> None:
    """Between two listings and after one: the store's clock dates what a worker with a wrong clock put."""
    sweeper = sweepers()
    assert sweeper.run_once()
    put(store, 1)
    worker = SharedIndex(store, "w", capacity=100, clock=lambda: time.time() + off_s)
    worker.note_put(N, 100, "x", 1.0)
    worker.note_hit(N)
    worker.sync()
    assert sweeper.run_once() and there(store) == {N}, "it did not die at once"
    entry = sweeper.catalogue.get(N)
    assert abs(entry.created - time.time()) < 60 and abs(entry.last_hit - time.time()) < 60
    assert sweeper.reader.redated == 2
    sweeper._clock = lambda: time.time() + 2 * HOUR + 60
    assert sweeper.run_once() and there(store) == set(), "nor does it live for ever"


def test_a_listing_corrects_dates_that_a_snapshot_carries_on(store: KvStore, sweepers: Any) -> None:
    put(store, "old", "new", "right")
    now = int(time.time())
    wrong = [
        Entry(name("acme", "old"), 100, "x", 5, 5, 0, 0.0, 0), Entry(name("acme", "new"), 100, "x", now + 10**7, now + 10**7, 3, 0.0, 0),
        Entry(name("acme", "right"), 100, "x", now - 200, now - 100, 1, 0.0, 0),
    ]  # fmt: skip
    store.write(SNAPSHOT_OBJECT, encode(wrong, {}, True))
    sweeper = sweepers()
    assert sweeper.run_once() and len(there(store)) == 3
    found = {n: sweeper.catalogue.get(name("acme", n)) for n in ("old", "new", "right")}
    assert all(abs(found[n].created - now) < 60 and abs(found[n].last_hit - now) < 60 for n in ("old", "new"))
    assert found["right"][3:5] == (now - 200, now - 100), "control: what a clock may well say stays"
    assert sweeper.catalogue.counters["redated"] == 2


@pytest.mark.parametrize("off_s", [-5 * HOUR, 5 * HOUR])
def test_the_sweepers_own_clock_counts_as_little(store: KvStore, sweepers: Any, off_s: float) -> None:
    put(store, 1)
    sweeper = sweepers()
    sweeper._clock = sweeper._wall = lambda: time.time() + off_s
    assert sweeper.run_once() and there(store) == {N}
    assert abs(sweeper.values()["clock_skew_seconds"] + off_s) < 10
    sweeper._clock = lambda: time.time() + off_s + HOUR - 60
    assert sweeper.run_once() and there(store) == {N}
    sweeper._clock = lambda: time.time() + off_s + HOUR + 60
    assert sweeper.run_once() and there(store) == set()


def conflict() -> StorageError:
    return StorageError("STORAGE-CONFLICT", "forbidden", why="HTTP 409 Whatever", status=409, storage_code="Whatever")


def test_a_conflict_on_the_snapshot_is_tried_again(
    store: KvStore, sweepers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    sweeper, left = sweepers(), [2]
    real = sweeper.snapshot._put

    def twice(body: bytes) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise conflict()
        return str(real(body))

    monkeypatch.setattr(sweeper.snapshot, "_put", twice)
    assert sweeper.run_once() and not sweeper.problems
    raw, _ = store.read(SNAPSHOT_OBJECT)
    assert [e.name for e in decode(raw or b"").entries] == [N]  # type: ignore[union-attr]


def test_a_snapshot_that_cannot_be_written_stops_no_sweep_and_no_journal_goes(
    store: KvStore, sweepers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("components.common.kv.publishing._WAIT_S", 0.01)
    put(store, *range(5))
    blob = journal(store, f"p {N} 100 x 1.0 - {time.time():.3f}", worker="w")
    status = tmp_path / "status.json"
    rule = RetentionClass(ttl_s=HOUR, max_ttl_s=HOUR, bytes=200)
    sweeper = sweepers(rule, status_file=str(status), journal_keep_s=0.001)
    real = sweeper.snapshot._put
    monkeypatch.setattr(sweeper.snapshot, "_put", lambda body: (_ for _ in ()).throw(conflict()))
    time.sleep(1.1)  # the service's times are whole seconds
    assert sweeper.run_once() and len(there(store)) == 2 and sweeper.counters["sweeps"] == 1
    assert "STORAGE-CONFLICT" in json.loads(status.read_text())["problems"]["snapshot"]
    assert store.account.find(store.control, blob) is not None, "the snapshot does not cover it"
    monkeypatch.setattr(sweeper.snapshot, "_put", real)
    assert sweeper.run_once() and not sweeper.problems and store.account.find(store.control, blob) is None


def test_a_blob_of_another_kind_under_the_snapshots_name_is_replaced(store: KvStore, sweepers: Any) -> None:
    put(store, 1)
    store.account.append_open(store.control, SNAPSHOT_OBJECT)
    sweeper = sweepers()
    assert sweeper.run_once() and not sweeper.problems
    assert decode(store.read(SNAPSHOT_OBJECT)[0] or b"") is not None


def steal(store: KvStore) -> None:
    """Another sweeper holds the lease now."""
    from azure.storage.blob import BlobLeaseClient

    lock = store.account.blob(store.control, LOCK_OBJECT)
    BlobLeaseClient(lock).break_lease(0)
    lock.acquire_lease(15)


def test_who_lost_the_lease_while_writing_does_not_replace_the_heirs_snapshot(store: KvStore, sweepers: Any) -> None:
    put(store, 1)
    slow = sweepers()
    assert slow.run_once()
    steal(store)
    store.write(SNAPSHOT_OBJECT, b"the heir's")  # while the slow one, by its own clock, still holds the lease
    assert slow.lease.held and not slow._publish()
    assert store.read(SNAPSHOT_OBJECT)[0] == b"the heir's"


def test_a_lease_lost_within_a_batch_stops_its_deletions(store: KvStore, sweepers: Any) -> None:
    put(store, *range(40))
    sweeper = sweepers(RetentionClass(ttl_s=HOUR, max_ttl_s=HOUR, bytes=0))
    real, keep, seen = store.account.blob, sweeper.lease.keep, []

    def blob(container: str, of: str) -> Any:
        if not of.startswith("_"):  # a deletion is about to be sent
            seen.append(of)
            if len(seen) == 10:
                sweeper.lease._until = 0.0  # its time is over: no more is certain
        return real(container, of)

    store.account.blob = blob  # type: ignore[method-assign]
    sweeper.lease.keep = lambda: keep() if len(seen) < 10 else False
    assert not sweeper.run_once() and sweeper.counters["lease_lost"] == 1
    assert 10 <= len(seen) <= 17, "at most what the eight threads had begun"
    assert len(there(store)) == 40 - len(seen)


def test_an_object_that_cannot_go_keeps_no_other(store: KvStore, sweepers: Any) -> None:
    put(store, 1, 2, 3)
    store.account.blob(store.control, N).create_snapshot()
    held = store.account.blob(store.control, name("acme", 2)).acquire_lease(-1)
    sweeper = sweepers(RetentionClass(ttl_s=HOUR, max_ttl_s=HOUR, bytes=0))
    assert sweeper.run_once() and there(store) == {name("acme", 2)} and sweeper.counters["delete_failed"] == 1
    held.release()
    assert sweeper.run_once() and there(store) == set()


def test_a_fault_of_ours_ends_a_turn_and_not_the_sweeper(
    store: KvStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import threading

    put(store, 1)
    turns: list[str] = []
    stop = threading.Event()
    real = State.turn

    def turn(self: State, why: str, *more: Any) -> None:
        real(self, why, *more)
        turns.append(why)
        if len(turns) == 2:
            stop.set()

    calls = iter([True])
    before = Sweeper.relist

    def relist(self: Sweeper) -> None:
        if next(calls, False):
            raise ZeroDivisionError("planted")
        before(self)

    monkeypatch.setattr(State, "turn", turn)
    monkeypatch.setattr(Sweeper, "relist", relist)
    monkeypatch.setattr("components.common.kv.sweeper._RETRY_S", 0.1)
    status = tmp_path / "no such folder" / "status.json"  # nor does a status nobody can write
    run(SweeperConfig(account=store.account.config, container=store.control, lease_s=15, status_file=str(status)), stop)
    assert turns == ["KV-SWEEP-FAULT: ZeroDivisionError: planted", ""]


def test_health_says_what_does_not_work_while_the_rest_goes_on() -> None:
    state = State()
    state.turn("", {"leading": 1}, {"generations": "KV-EPOCHS-INVALID: lost"})
    assert state.health() == (200, "sweeping; generations: KV-EPOCHS-INVALID: lost")
    state.turn("", {"leading": 1}, {})
    assert state.health() == (200, "sweeping")


def test_a_retired_container_that_refuses_stops_no_sweep(store: KvStore, sweepers: Any) -> None:
    remember(store, [store.control, "Bad_Name"])  # by hand, say; one without rights for us is the same
    put(store, 1)
    one = sweepers()
    assert one.run_once() and "STORAGE-REQUEST" in one.problems["retired"] and len(one.catalogue) == 1
    late, one._clock = one._clock, lambda: late() + 3 * HOUR
    assert one.run_once() and there(store) == set()
    store.write(CONTAINERS_OBJECT, json.dumps({"format": FORMAT, "containers": [store.control]}).encode())
    store.delete(store.control, [COPY_OBJECT])
    one.start_over()
    assert one.run_once() and "retired" not in one.problems


def test_the_lease_is_kept_during_a_listing_longer_than_it(
    store: KvStore, sweepers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sweepers whose listings outlast a lease would take it from each other for ever."""
    remember(store, [store.control, "no-such-container"])
    put(store, *range(8))
    one, real, seen = sweepers(), store.list, []
    monkeypatch.setattr("components.common.kv.store.KEEP_EVERY", 2)

    def slow(container: str, prefix: str = "") -> Any:
        for info in real(container, prefix):
            if not info.name.startswith("_"):
                one.lease._until -= 5.0  # of the 12 s that we count on a lease of 15 s
                seen.append(one.lease.held)
            yield info

    monkeypatch.setattr(store, "list", slow)
    assert one.run_once() and len(seen) == 8 and all(seen)


def test_notes_of_workers_that_ended_go_and_those_of_live_ones_stay(store: KvStore, sweepers: Any) -> None:
    killed, live = Fence(store, "killed"), Fence(store, "live")
    killed.register()
    live.register()
    live.raised(tenant_hash("acme"), 1)
    assert live.turn()
    one = sweepers()
    assert one.run_once() and len(list(store.list(store.control, WORKERS_PREFIX))) == 2
    first = store.read(live.name)[1]
    assert live.turn() and store.read(live.name)[1] == first, "nothing new to say"
    assert live.turn(beat=True) and store.read(live.name)[1] != first, "said again, so that it is known to live"
    late, one._clock = one._clock, lambda: late() + DAY + 60
    store.delete(store.control, [live.name])
    assert one.run_once() and list(store.list(store.control, WORKERS_PREFIX)) == []
    assert live.turn(beat=True), "one that was only cut off makes itself known again"
    assert asked(store, tenant_hash("acme"), 1).confirmed == [live.name.removeprefix(WORKERS_PREFIX)[:-5]]
