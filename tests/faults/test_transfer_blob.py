"""Each hazard of NIXL's AZURE_BLOB plugin, contained (components.common.transfer)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.common.kv.stores import connection
from components.common.transfer.agent import Agent
from components.common.transfer.base import Connection, Outcome
from components.common.transfer.nixl_blob import BlobTransport
from components.common.transfer.staging import Slot, StagingPool
from tests.kvtools.azure import Store, azurite, free_port
from tests.kvtools.proxy import FaultProxy, wait_for

MB = 1 << 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with azurite(tmp_path_factory.mktemp("azurite")) as store:
        account = store.account()
        account.ensure_container("kvt")
        for name, fill in (("k/one", 1), ("k/two", 2)):
            account.put("kvt", name, bytes([fill]) * MB)
        yield store


@pytest.fixture(scope="module")
def proxy(store: Store) -> Iterator[FaultProxy]:
    with FaultProxy(store.port, free_port()) as proxy:
        yield proxy


@pytest.fixture
def make(store: Store, proxy: FaultProxy) -> Iterator[object]:
    made: list[BlobTransport] = []
    proxy.heal()
    proxy.seen.clear()

    def new(container: str = "kvt", slots: int = 4, connect: object = None, **more: object) -> BlobTransport:
        account = store.account(proxy.port)
        transport = BlobTransport(
            StagingPool(slots, MB), connect or (lambda: connection(account, container)),
            container=lambda: account.probe(container), **{"threads": 4, "open_s": 0.2, **more},
        )  # fmt: skip
        made.append(transport)
        return transport

    yield new
    proxy.heal()
    for transport in made:
        assert transport.close(15), "transfers were left in flight"


class Ask:
    """Calls an asynchronous method and waits for its one answer."""

    def __init__(self) -> None:
        self.answers: list[object] = []
        self._came = threading.Event()
        self.at = 0.0

    def __call__(self, answer: object) -> None:
        self.answers.append(answer)
        self.at = time.monotonic()
        self._came.set()

    def wait(self, timeout: float = 20.0) -> object:
        assert self._came.wait(timeout), "no answer"
        return self.answers[0]


def read(t: BlobTransport, name: str, slot: Slot, seconds: float = 10.0) -> object:
    ask = Ask()
    t.read(name, slot, MB, time.monotonic() + seconds, ask)
    return ask.wait()


def write(t: BlobTransport, name: str, slot: Slot, seconds: float = 10.0) -> object:
    ask = Ask()
    t.write(name, slot, MB, time.monotonic() + seconds, ask)
    return ask.wait()


def exists(t: BlobTransport, names: list[str], seconds: float = 5.0) -> dict[str, bool | None]:
    ask = Ask()
    t.exists(names, time.monotonic() + seconds, ask)
    return ask.wait()  # type: ignore[return-value]


def test_round_trip(make) -> None:
    t = make()
    slot = t.pool.acquire()
    slot.array[:] = 77
    assert write(t, "new/a", slot) is Outcome.DONE
    slot.array[:] = 0
    assert read(t, "new/a", slot) is Outcome.DONE
    assert (slot.array[:MB] == 77).all()
    assert exists(t, ["new/a", "new/b"]) == {"new/a": True, "new/b": False}


def test_missing_object_is_missing_and_no_failure(make) -> None:
    t = make(errors=1)
    slot = t.pool.acquire()
    assert read(t, "k/none", slot) is Outcome.MISSING
    assert t.available(False)


def test_one_failing_transfer_leaves_the_others_alone(make, proxy) -> None:
    """One descriptor per handle: a missing object among slow ones ends alone, and nobody writes into its slot afterwards."""
    t = make()
    proxy.fault("delay", 1.0, match="k/one")
    slots = [t.pool.acquire() for _ in range(4)]
    asks = [Ask() for _ in slots]
    for slot in slots:
        slot.array[:] = 9
    for slot, ask, name in zip(slots, asks, ["k/one", "k/none", "k/one", "k/one"], strict=True):
        t.read(name, slot, MB, time.monotonic() + 15, ask)
    assert asks[1].wait() is Outcome.MISSING
    assert [a.answers for a in asks].count([]) == 3, "the slow ones are still under way"
    t.pool.release(slots[1])
    assert [a.wait() for a in (asks[0], asks[2], asks[3])] == [Outcome.DONE] * 3
    assert (slots[1].array == 9).all() and (slots[0].array[:MB] == 1).all()


def test_device_ids_are_never_reused(make) -> None:
    """Two registrations with one id would read each other's object in silence."""
    t = make(slots=8, threads=8)
    slots = [t.pool.acquire() for _ in range(8)]
    for _ in range(5):
        asks = [Ask() for _ in slots]
        for i, (slot, ask) in enumerate(zip(slots, asks, strict=True)):
            t.read(("k/one", "k/two")[i % 2], slot, MB, time.monotonic() + 15, ask)
        assert [a.wait() for a in asks] == [Outcome.DONE] * 8
        for i, slot in enumerate(slots):
            assert (slot.array[:MB] == 1 + i % 2).all()


def test_deadline_then_quarantine_then_late_write_hits_only_the_quarantined_slot(make, proxy) -> None:
    t = make(slots=2, errors=99)
    proxy.fault("delay", 2.0, match="k/two", count=1)
    slot = t.pool.acquire()
    slot.array[:] = 9
    began = time.monotonic()
    assert read(t, "k/two", slot, seconds=0.5) is Outcome.LATE
    assert time.monotonic() - began < 1.5
    assert t.pool.quarantined == 1 and (slot.array == 9).all()
    other = t.pool.acquire()
    assert other is not slot
    other.array[:] = 5
    assert t.pool.acquire() is None, "the quarantined slot is not given out"
    wait_for(lambda: t.pool.quarantined == 0, 10, "the late transfer ends")
    assert (slot.array[:MB] == 2).all(), "it wrote, late"
    assert (other.array == 5).all()
    t.pool.release(other)
    assert t.pool.free == 2
    t.pool.check_integrity()


def test_a_transfer_in_progress_is_never_released(store, proxy) -> None:
    account = store.account(proxy.port)
    pool = StagingPool(1, MB)
    agent = Agent("AZURE_BLOB", {**connection(account, "kvt").params, "num_threads": "2"}, pool)
    proxy.heal()
    proxy.fault("delay", 1.0, match="k/one")
    slot = pool.acquire()
    handle = agent.start(False, slot.address, MB, "k/one")
    with pytest.raises(RuntimeError, match="in progress"):
        agent.finish(handle)
    with pytest.raises(RuntimeError, match="in flight"):
        agent.retire()
    wait_for(lambda: agent.state(handle) != "PROC")
    agent.finish(handle)
    agent.retire()


def test_an_agent_is_driven_by_one_thread(store) -> None:
    agent = Agent("AZURE_BLOB", {**connection(store.account(), "kvt").params, "num_threads": "2"}, None)
    agent.query(["k/one"])
    found: list[BaseException] = []

    def other() -> None:
        try:
            agent.query(["k/one"])
        except RuntimeError as e:
            found.append(e)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found


def test_breaker_opens_on_consecutive_errors_and_a_probe_closes_it(make, proxy) -> None:
    t = make(errors=3)
    slot = t.pool.acquire()
    proxy.fault("status", 403, match="k/")
    for _ in range(3):
        assert read(t, "k/one", slot) is Outcome.FAILED
    assert not t.available(False)
    requests = len(proxy.seen)
    began = time.monotonic()
    assert read(t, "k/one", slot) is Outcome.REFUSED
    assert exists(t, ["k/one"]) == {"k/one": None}
    assert time.monotonic() - began < 0.1, "an open breaker answers at once"
    assert proxy.count(path="/kvtest/kvt/k/one") <= requests
    assert t.available(True), "reads that fail say nothing about writes"
    proxy.heal()
    wait_for(lambda: t.available(False), 10, "the probe closes it")
    assert read(t, "k/one", slot) is Outcome.DONE


def test_store_killed_then_back(tmp_path: Path) -> None:
    with azurite(tmp_path) as store:
        account = store.account()
        account.ensure_container("kvt")
        account.put("kvt", "a", b"x" * MB)
        t = BlobTransport(
            StagingPool(2, MB), lambda: connection(account, "kvt"), container=lambda: account.probe("kvt"), errors=2,
            open_s=0.2, max_open_s=0.5,
        )  # fmt: skip
        slot = t.pool.acquire()
        assert read(t, "a", slot) is Outcome.DONE
        store.kill()
        for _ in range(2):
            began = time.monotonic()
            outcome = read(t, "a", slot, seconds=1.0)
            assert outcome in (Outcome.LATE, Outcome.FAILED) and time.monotonic() - began < 2
            if outcome is Outcome.LATE:
                wait_for(lambda: t.pool.free > 0, 20)
                slot = t.pool.acquire()
        wait_for(lambda: not t.available(False), 5)
        store.start()
        account.ensure_container("kvt")  # Azurite saves its index every 5 s: killed before, it forgets what was put
        account.put("kvt", "a", b"x" * MB)
        wait_for(lambda: t.available(False), 60, "recovers by itself")
        assert read(t, "a", slot) is Outcome.DONE
        assert t.close(10)


def test_hung_store_costs_the_deadline_and_new_transfers_go_on_after_it(make, proxy) -> None:
    """Every thread of NIXL hangs for minutes: a new back end takes over, the old one drains."""
    t = make(slots=6, threads=2, errors=99)
    slot = t.pool.acquire()
    assert read(t, "k/one", slot) is Outcome.DONE
    t.pool.release(slot)
    proxy.fault("hang", match="k/")
    hung = [Ask() for _ in range(4)]
    for ask in hung:
        t.read("k/one", t.pool.acquire(), MB, time.monotonic() + 0.5, ask)
    assert [a.wait(3) for a in hung] == [Outcome.LATE] * 4
    proxy.rules.clear()  # the store is well again, but the hung requests hang on
    slot = t.pool.acquire()
    assert read(t, "k/one", slot, seconds=5) is Outcome.DONE
    assert t.stats()["replaced_total"] == 1 and t.stats()["lanes"] == 2
    proxy.heal()
    wait_for(lambda: t.stats()["lanes"] == 1 and t.pool.quarantined == 0, 20, "the old back end drains")


def test_hung_existence_question_is_unknown_by_its_deadline(make, proxy) -> None:
    t = make(errors=99)
    assert exists(t, ["k/one"]) == {"k/one": True}
    proxy.fault("hang", methods=("HEAD",))
    began = time.monotonic()
    assert exists(t, ["k/one", "k/two"], seconds=0.3) == {"k/one": None, "k/two": None}
    assert time.monotonic() - began < 1.0
    proxy.rules.clear()
    assert exists(t, ["k/two"], seconds=8) == {"k/two": True}, "another worker takes over from the stuck one"


def test_missing_container_is_told_from_a_miss(make) -> None:
    """NIXL answers "not there" for both."""
    t = make(container="gone")
    slot = t.pool.acquire()
    assert exists(t, ["k/one"]) == {"k/one": None}
    assert read(t, "k/one", slot) is Outcome.FAILED
    assert t.stats()["container_ok"] == 0 and "gone" in t.container_why


def test_credential_renewal_opens_a_new_back_end_and_drains_the_old(make, store, proxy) -> None:
    account = store.account(proxy.port)
    opened: list[float] = []

    def connect() -> Connection:
        opened.append(time.time())
        return Connection(connection(account, "kvt").params, time.time() + 1.0)

    t = make(connect=connect)
    proxy.fault("delay", 2.0, match="k/two", count=1)
    slow, fast = t.pool.acquire(), t.pool.acquire()
    ask = Ask()
    t.read("k/two", slow, MB, time.monotonic() + 10, ask)
    wait_for(lambda: time.time() > opened[0] + 1.05, 5)
    assert read(t, "k/one", fast) is Outcome.DONE
    assert t.stats()["renewed_total"] >= 1 and t.stats()["lanes"] == 2, "the old one still carries the slow read"
    assert ask.wait() is Outcome.DONE and (slow.array[:MB] == 2).all()
    wait_for(lambda: t.stats()["lanes"] == 1, 5, "drained and dropped")


def test_revoked_credential_fails_fast_and_opens_the_breaker(make, store) -> None:
    account = store.account()
    text = connection(account, "kvt").params["connection_string"]
    wrong = text.replace("sig=", "sig=AAAA")
    t = make(connect=lambda: Connection({"container_name": "kvt", "connection_string": wrong}), errors=2)
    slot = t.pool.acquire()
    began = time.monotonic()
    assert [write(t, "k/x", slot) for _ in range(2)] == [Outcome.FAILED] * 2
    assert time.monotonic() - began < 5 and not t.available(True)


EXIT = """
import sys, time
from pathlib import Path
from components.common.storage.account import Account
from components.common.storage.config import AccountConfig
from components.common.kv.stores import connection
from components.common.transfer.nixl_blob import BlobTransport, leave_at_exit
from components.common.transfer.staging import StagingPool
account = Account(AccountConfig.parse(__import__("json").loads(sys.argv[1])))
t = BlobTransport(StagingPool(4, 1 << 20), lambda: connection(account, "kvt"), threads=2)
if sys.argv[2] == "leave":
    leave_at_exit(t)
while not t.stats()["lanes"]:  # importing NIXL imports torch
    time.sleep(0.01)
reads = int(sys.argv[3])
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(5)  # Python ends slowly: what comes back from C++ meanwhile finds no interpreter
slow = Slow()
for _ in range(reads):
    t.read("k/one", t.pool.acquire(), 1 << 20, time.monotonic() + 0.5, lambda outcome: print(outcome, flush=True))
t.exists(["k/one"], time.monotonic() + 0.2, lambda found: print(found, flush=True))
while t.pool.quarantined < reads or not t.stats().get("query_late_total"):
    time.sleep(0.01)
print("leaving", flush=True)
"""


@pytest.mark.parametrize("reads", [4, 0])
def test_clean_exit_with_transfers_and_a_question_in_flight(store, proxy, tmp_path: Path, reads: int) -> None:
    """A question alone aborted the process ("terminate called without an active exception")."""
    proxy.heal()
    proxy.fault(*(("hang",) if reads else ("delay", 3.0)), match="k/")
    account = store.account_config(proxy.port).model_dump_json()
    done = subprocess.run(
        [sys.executable, "-c", EXIT, account, "leave", str(reads)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and "leaving" in done.stdout, done.stderr[-2000:]
    assert done.stdout.count("late") == reads
    proxy.heal()
