"""Pulls from peers that hang, answer nonsense or send wrong bytes: real Peers and Wire, over a NIXL of our own."""

from __future__ import annotations

import base64
import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from components.common.loading.report import Report
from components.weights.peers import Peers
from components.weights.service import WeightService
from components.weights.wire import Wire
from tests.kvtools.proxy import wait_for

SLOTS, RANGE, RANGES, PULL_S = 8, 4096, 60, 0.5
GOOD = blake3(bytes(RANGE)).hexdigest()
FILE: Any = SimpleNamespace(blake3="d" * 64, path="f.safetensors", size=RANGE * RANGES, ranges=[GOOD] * RANGES)
ALL = f"{(1 << RANGES) - 1:x}"


class Agent:
    """NIXL: what a transfer does depends on the remote agent's name and the address read."""

    made: Agent

    def __init__(self, name: str, config: object) -> None:
        Agent.made = self
        self.added: list[bytes] = []
        self.registered: list[Any] = []
        self.state: Callable[[str, int], str] = lambda agent, address: "PROC" if agent == "hangs" else "DONE"
        self.fill: Callable[[str, int], int] = lambda agent, address: 0
        self.release: Callable[[], None] = lambda: None
        self.forget: Callable[[Any], None] = self.registered.remove

    def register_memory(self, memory: list[Any], kind: str) -> Any:
        self.registered.append(memory)
        return memory

    def deregister_memory(self, handle: Any) -> None:
        self.forget(handle)

    def get_agent_metadata(self) -> bytes:
        return b"metadata of %d" % len(self.registered)

    def add_remote_agent(self, metadata: bytes) -> str:
        self.added.append(metadata)
        return "name"

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], kind: str) -> tuple[int, int, int]:
        return descs[0]

    def initialize_xfer(self, op: str, local: Any, remote: Any, agent: str) -> Any:
        return SimpleNamespace(local=local, remote=remote, agent=agent)

    def transfer(self, handle: Any) -> str:
        if self.state(handle.agent, handle.remote[0]) == "DONE":
            ctypes.memset(handle.local[0], self.fill(handle.agent, handle.remote[0]), handle.local[1])
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return self.state(handle.agent, handle.remote[0])

    def release_xfer_handle(self, handle: Any) -> None:
        self.release()


class Peer:
    """A weight service's HTTP face: `answer(path)` is the body."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.asked: list[str] = []
        me = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                me.asked.append(self.path)
                found = answer(self.path)
                body = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def offer(name: str, at: int = 0, **changes: Any) -> dict[str, Any]:
    metadata = base64.b64encode(name.encode()).decode()
    return {"agent": name, "address": at, "metadata": metadata, "have": ALL, **changes}


def ready(agent: str, address: int = 0) -> Callable[[str], Any]:
    """A peer that has everything."""
    return lambda path: (
        {"state": "ready", "offer": offer(agent, address)} if "/claim" in path else offer(agent, address)
    )


class Service:
    def __init__(self, *answers: Callable[[str], Any]) -> None:
        self.wire, self.report = Wire(None, SLOTS, RANGE), Report()  # type: ignore[arg-type]
        assert self.wire.wait_started()
        self.others = [Peer(a) for a in answers]
        addresses = tuple(p.address for p in self.others)
        self.peers = Peers("me", addresses, self.wire, self.report, RANGE, PULL_S)

    def fetch(self, index: int = 0, keep: Callable[[memoryview], bytes] = bytes) -> bool:
        try:
            return self.peers.fetch(FILE, index, lambda landed: memoryview(keep(landed)), lambda: False)
        finally:
            self.peers.done(FILE.blake3, index)

    def left_out(self, other: int = 0) -> float:
        return self.peers._absent.get(self.others[other].address, 0.0) - time.monotonic()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Service]]:
    fake: Any = ModuleType("nixl._api")
    fake.nixl_agent, fake.nixl_agent_config = Agent, lambda **_: None
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", fake)
    made: list[Service] = []

    def make(*answers: Callable[[str], Any]) -> Service:
        made.append(Service(*answers))
        return made[-1]

    yield make
    for s in made:
        s.wire.close()
        for other in s.others:
            other.close()


def test_a_peer_that_hangs_does_not_take_the_place_of_one_that_is_well(service: Callable[..., Service]) -> None:
    """All landing slots were quarantined for the one, then the other was left out for having none (396 of 400 from Blob)."""
    s = service(ready("hangs"), ready("well"))

    def one(index: int) -> bool:
        time.sleep(0.01)
        return s.fetch(index)

    with ThreadPoolExecutor(SLOTS) as pool:
        found = list(pool.map(one, range(RANGES)))
    assert found.count(False) == 0, s.report.as_json()
    assert 1 <= s.wire.pool.quarantined <= SLOTS // 2
    assert s.left_out(0) > 20 > 0 > s.left_out(1)
    shown = s.peers.status()["left_out"]
    assert list(shown) == [s.others[0].address] and 20 < shown[s.others[0].address] <= 30, "and the status says so"
    assert not [key for key in s.peers._have if key[0] == s.others[0].address]


@pytest.mark.parametrize(("peers", "most"), [(1, SLOTS), (2, SLOTS // 2)])
def test_the_only_peer_may_have_all_landing_slots(service: Callable[..., Service], peers: int, most: int) -> None:
    """There is nobody to leave them to; with half of them pulls from one peer ran at three quarters of NIXL's rate."""
    s = service(*[ready("well")] * peers)
    go, reading = threading.Event(), set[int]()

    def state(agent: str, address: int) -> str:
        return "DONE" if go.is_set() else "PROC"

    Agent.made.state = state
    pull = s.wire.pull

    def counted(offer: Any, begin: int, *more: Any) -> Any:
        reading.add(begin)
        return pull(offer, begin, *more)

    s.wire.pull = counted  # type: ignore[method-assign]
    with ThreadPoolExecutor(RANGES) as pool:
        asked = [pool.submit(s.fetch, i) for i in range(RANGES)]
        wait_for(lambda: len(reading) == most * peers)
        time.sleep(0.1)
        assert len(reading) == most * peers
        assert all(n <= most for n in s.peers._pulling.values())
        go.set()
        assert sum(a.result() for a in asked) >= most * peers


def test_no_landing_slot_is_our_own_lack(service: Callable[..., Service]) -> None:
    s = service(ready("well"))
    for _ in range(SLOTS):
        slot = s.wire.pool.acquire()
        assert slot is not None
        s.wire.pool.quarantine(slot)
    began = time.monotonic()
    assert not s.fetch()
    assert time.monotonic() - began < PULL_S, "no slot can come: nothing to wait for"
    assert s.left_out() < 0 and not s.peers._failures
    assert "peer_failed" not in s.report.as_json()


BAD = {
    "address Infinity": b'{"agent": "a", "address": Infinity, "metadata": "", "have": "1"}',
    "address huge": offer("a", 1 << 70),
    "address text": offer("a", address="x"),
    "address bool": offer("a", address=True),
    "no agent": {"address": 0, "metadata": "", "have": "1"},
    "agent number": offer("a", agent=3),
    "metadata null": offer("a", metadata=None),
    "metadata text": offer("a", metadata="äöü?"),
    "have negative": offer("a", have="-1"),
    "have number": offer("a", have=7),
    "a list": [],
    "null": None,
    "deep": b"[" * 100_000,
    "no JSON": b"\xff\xfe",
}


@pytest.mark.parametrize("claim", [True, False], ids=["claim", "range"])
@pytest.mark.parametrize("bad", list(BAD.values()), ids=list(BAD))
def test_nonsense_is_the_peers_failure_and_costs_no_slot(
    service: Callable[..., Service], bad: Any, claim: bool
) -> None:
    def answer(path: str) -> Any:
        if "/range" in path:
            return bad
        if not claim:
            return {"state": "ready"}
        return (
            b'{"state": "ready", "offer": ' + bad + b"}" if isinstance(bad, bytes) else {"state": "ready", "offer": bad}
        )

    s = service(answer)
    assert not s.fetch()
    assert s.wire.pool.free == SLOTS
    assert s.left_out() > 1


def test_an_older_peer_does_not_say_what_else_it_has(service: Callable[..., Service]) -> None:
    old = {k: v for k, v in offer("well").items() if k != "have"}
    s = service(lambda path: {"state": "ready"} if "/claim" in path else old)
    assert s.fetch(0) and s.fetch(1)


def test_wrong_bytes_under_an_old_offer_are_asked_for_again(service: Callable[..., Service]) -> None:
    """The peer has got other memory for the file since: it did not lie."""
    s = service(lambda path: {"state": "ready", "offer": offer("a", 1 << 20)} if "/claim" in path else offer("a"))
    Agent.made.fill = lambda agent, address: address >> 20
    assert s.fetch()
    assert not s.peers.marked and [p.split("?")[0] for p in s.others[0].asked] == ["/v1/peer/claim", "/v1/peer/range"]


def test_a_bad_page_of_ours_marks_nobody(service: Callable[..., Service]) -> None:
    s = service(ready("a"))
    assert not s.fetch(keep=lambda landed: b"x" * len(landed))
    assert not s.peers.marked and s.left_out() < 0
    assert s.report.as_json()["kept_wrong"] == 1


def test_a_liar_is_another_one_after_a_restart(
    service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "liar"

    def answer(path: str) -> Any:
        return {"peers": {"agent": name}} if "/status" in path else ready(name)(path)

    s = service(answer)
    Agent.made.fill = lambda agent, address: agent == "liar"
    assert not s.fetch()
    assert list(s.peers.marked) == [s.others[0].address]
    asked = len(s.others[0].asked)
    assert not s.fetch() and len(s.others[0].asked) == asked
    for now, found in (("liar", False), ("reborn", True)):
        name = now
        s.peers._liars[s.others[0].address] = ("liar", 0.0)  # half a minute later
        assert s.peers._usable(s.others[0].address) is found
    assert not s.peers.marked


def test_an_agent_that_nixl_lost_is_added_again(service: Callable[..., Service]) -> None:
    s = service(ready("a"), ready("b"))
    for index in range(12):
        assert s.fetch(index)
    assert sorted(Agent.made.added) == [b"a", b"b"]
    Agent.made.state = lambda agent, address: "ERR" if agent == "a" else "DONE"
    for index in range(12):
        assert s.fetch(index)
    Agent.made.state = lambda agent, address: "DONE"
    s.peers._absent.clear()
    s.peers._have.clear()
    for index in range(12):
        assert s.fetch(index)
    assert sorted(Agent.made.added) == [b"a", b"a", b"b"]


def test_a_check_that_raises_proves_no_end(service: Callable[..., Service]) -> None:
    s = service(ready("a"))

    def lost(agent: str, address: int) -> str:
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    Agent.made.state = lost
    Agent.made.transfer = lambda handle: "PROC"  # type: ignore[method-assign]
    assert not s.fetch()
    assert s.report.as_json()["peer_late"] == 1 and s.wire.pool.quarantined == 1
    Agent.made.state = lambda agent, address: "ERR"  # now it says that it is over
    wait_for(lambda: s.wire.pool.free == SLOTS)
    assert not s.peers._pulling.total() and not s.peers._late.total()


def test_the_thread_outlives_whatever_nixl_raises(
    service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = service(ready("a"))

    def fails(*_: object) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    Agent.made.release = fails
    assert s.fetch(0), "done is done"
    for index, what in enumerate(("_look", "_step"), 1):
        with monkeypatch.context() as m:
            m.setattr(s.wire, what, fails)
            time.sleep(1.2 if what == "_step" else 0.0)  # the step under way waits a second for a command
            began = time.monotonic()
            assert not s.fetch(index)
            assert time.monotonic() - began < PULL_S + 5, "nobody waits for the thread for ever"
            assert s.wire.pool.quarantined == 1
        wait_for(lambda: s.wire.pool.free == SLOTS)
        s.wire.pool.check_integrity()
        s.peers._absent.clear()
        assert s.fetch(index)


def test_replaced_memory_stays_until_its_offers_are_over(
    service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    s, released = service(), []
    monkeypatch.setattr(s.wire, "cache", SimpleNamespace(pin=lambda entry: None, release=released.append))
    entries: list[Any] = [SimpleNamespace(file=FILE, array=np.zeros(RANGE, np.uint8)) for _ in range(2)]
    offers = [s.wire.offer(e) for e in entries]
    assert offers[0]["address"] != offers[1]["address"]
    assert len(Agent.made.registered) == 3 and not released
    assert s.wire.offered(entries[0]) is None
    assert s.wire.offered(entries[1]) == offers[1]

    def fails(_: object) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    Agent.made.forget = fails
    monkeypatch.setattr("components.weights.wire._IDLE_S", 0.0)
    monkeypatch.setattr("components.weights.wire._SWEEP_S", 0.0)
    wait_for(lambda: len(released) == 2)
    assert s.wire.offered(entries[1]) is None and len(s.wire._kept) == 2
    assert s.wire.offer(entries[0])["address"] == offers[0]["address"], "the thread lives"


def test_a_claim_waits_for_nothing_and_makes_nothing(
    service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had registered the file, up to 5 s on NIXL's thread, and leased it, which may evict another."""
    s, entry = service(), SimpleNamespace(file=FILE, array=np.zeros(RANGE, np.uint8), ready=bytearray([1, 0, 1]))
    unaltered = True
    cache = SimpleNamespace(entry=lambda digest: entry, unaltered=lambda entry: unaltered, pin=lambda entry: None)
    monkeypatch.setattr(s.wire, "cache", cache)
    weights: Any = WeightService.__new__(WeightService)
    weights.cache, weights.wire, weights.peers, weights.count = cache, s.wire, s.peers, lambda name: None
    weights._range_of = lambda digest, index: FILE
    assert weights.claim("other", FILE.blake3, 0) == {"state": "ready"}
    assert len(Agent.made.registered) == 1, "the landing slots"
    known = s.wire.offer(entry)  # somebody asked for the range
    assert weights.claim("other", FILE.blake3, 0) == {"state": "ready", "offer": {**known, "have": "5"}}
    assert weights.claim("other", FILE.blake3, 1) == {"state": "free"}
    unaltered = False
    assert weights.claim("other", FILE.blake3, 0) == {"state": "ready"}
