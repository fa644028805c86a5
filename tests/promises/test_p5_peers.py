"""P5 over several nodes: weight services give each other ranges over NIXL; Blob gives each byte once.

Separate processes with separate cache directories, as if on several nodes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.standin import StandIn
from components.common.loading.report import Report
from components.common.loading.session import open_session
from components.common.registry.manifest import Manifest
from components.weights.peers import owner
from tests.faults.releases import MiB, digests, make_release, random_model, tensors_of, weights_config
from tests.faults.services import ServiceProcess
from tests.kvtools.proxy import wait_for

SHARDS = [tensors_of(s, [700_000, 1_500_000, 3, 900_000]) for s in range(3)]
WANTED = digests({k: v for s in SHARDS for k, v in s.items()})
DEADLINE_S = 4.0
STALL_S = 6.0
"""Of which a peer has 0.3 to answer a claim: one that only shares a busy machine must not look stalled."""
PATIENCE_S = 300.0
"""Where the deadline is not what is tested: a busy machine must not make a range come from Blob as well."""


class Nodes:
    def __init__(self, root: Path, store: StandIn, manifest: Manifest) -> None:
        self.root, self.store, self.manifest = root, store, manifest
        self.sockets = [f"unix:{root}/s/weights-{i}.sock" for i in range(4)]
        self.running: dict[int, ServiceProcess] = {}

    def start(self, i: int, deadline_s: float = PATIENCE_S, **weights_changes: Any) -> ServiceProcess:
        weights = weights_config(self.store.url, self.root / f"w{i}", self.manifest, **weights_changes)
        self.running[i] = ServiceProcess(
            self.root / "s", weights, name=f"weights-{i}", cache_dir=str(self.root / f"cache{i}"), cache_bytes=64 * MiB,
            peers=tuple(self.sockets), peer_deadline_s=deadline_s,
        ).start(90)  # fmt: skip
        return self.running[i]

    def load(self, i: int) -> dict[str, Any]:
        report = Report()
        with open_session(
            weights_config(self.store.url, self.root / f"w{i}", self.manifest, service=self.sockets[i]), None, report
        ) as session:
            assert digests(dict(session.tensors())) == WANTED
        return report.as_json()

    def from_store(self) -> dict[str, int]:
        return {
            f.path: self.store.served[f"weights/{f.blob}"]
            for f in self.manifest.files
            if f.path.endswith(".safetensors")
        }

    def claims(self) -> int:
        return sum(self.running[i].status()["counts"].get("claims", 0) for i in range(3))

    def sources(self, i: int) -> dict[str, int]:
        return dict(self.running[i].status()["load"]["bytes_by_source"])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    root = tmp_path_factory.mktemp("peers")
    random_model(root / "model", SHARDS)
    manifest = make_release(root / "store", root / "model", range_bytes=MiB // 4)
    store = StandIn(root / "store").start()
    n = Nodes(root, store, manifest)
    yield n
    for service in n.running.values():
        if service.process is not None and service.process.poll() is None:
            os.kill(service.process.pid, signal.SIGCONT)
            service.stop()
    store.close()


def test_rendezvous_spreads_and_moves_little() -> None:
    members = [f"unix:/n{i}" for i in range(5)]
    before = {i: owner(members, "d" * 64, i) for i in range(1000)}
    counts = [list(before.values()).count(m) for m in members]
    assert min(counts) > 130 and max(counts) < 280
    after = {i: owner(members[:-1], "d" * 64, i) for i in range(1000)}
    assert all(after[i] == before[i] for i in before if before[i] != members[-1]), "only the lost member's ranges move"


def test_a_three_at_once_blob_gives_each_byte_once(nodes: Nodes) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(nodes.start, range(3)))
        list(pool.map(nodes.load, range(3)))
    sizes = {f.path: f.size for f in nodes.manifest.files if f.path.endswith(".safetensors")}
    assert nodes.from_store() == sizes
    total = sum(sizes.values())
    gained = [nodes.sources(i) for i in range(3)]
    assert all(sum(g.values()) == total for g in gained)
    assert sum(g.get("blob", 0) for g in gained) == total
    assert sum(g.get("peer", 0) for g in gained) == 2 * total


def test_b_newcomer_takes_nothing_from_blob(nodes: Nodes) -> None:
    before, asked = nodes.from_store(), nodes.claims()
    nodes.start(3, range_in_flight=1)
    nodes.load(3)
    assert nodes.from_store() == before
    assert nodes.sources(3) == {"peer": sum(before.values())}
    ranges = sum(len(f.ranges) for f in nodes.manifest.files if f.path.endswith(".safetensors"))
    assert nodes.claims() - asked < ranges, "who has one range says which others it has: three claims a range before"


def wipe(nodes: Nodes, i: int, deadline_s: float = PATIENCE_S) -> None:
    """Node i loses its cache and starts again."""
    nodes.running[i].stop()
    for path in (nodes.root / f"cache{i}/objects").iterdir():
        path.unlink()
    nodes.start(i, deadline_s)


def test_case_09_peer_that_accepts_and_stalls_meets_its_deadline(nodes: Nodes) -> None:
    """It is asked, left out for a while, and the others give everything: what it had costs Blob no byte."""
    process = nodes.running[2].process
    assert process is not None
    wipe(nodes, 3, STALL_S)
    # importing NIXL may keep the interpreter from answers that came in time
    wait_for(lambda: nodes.running[3].status()["peers"]["wire_ready"], 90, "NIXL", every=0.05)
    assert nodes.running[3].status()["peers"]["left_out"] == {}
    before, asked = nodes.from_store(), nodes.running[2].status()["counts"]["claims"]
    os.kill(process.pid, signal.SIGSTOP)
    try:
        seen: dict[str, float] = {}
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(nodes.load, 3)
            while not loading.done():
                seen |= nodes.running[3].status()["peers"]["left_out"]
                time.sleep(0.05)
            loading.result()
        assert time.monotonic() - began < 20 + STALL_S
        status = nodes.running[3].status()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert set(seen) == {nodes.sockets[2]}, "who stalls is left out, and nobody else"
    assert 0 < seen[nodes.sockets[2]] <= 30
    total = sum(before.values())
    assert nodes.from_store() == before, "the store gave nothing: the others had it"
    assert status["load"]["bytes_by_source"] == {"peer": total} and status["peers"]["pulled_bytes"] == total
    assert status["peers"]["marked"] == {} and "peer_lies" not in status["load"]
    wait_for(lambda: nodes.running[2].status()["counts"]["claims"] > asked, 30, "the claims it slept over", every=0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can alter a cache file unnoticed")
def test_c_peer_that_lies_is_found_out_and_left(nodes: Nodes) -> None:
    for i in (0, 1):  # their verified memory is altered behind their back
        for path in (nodes.root / f"cache{i}/objects").iterdir():
            info = path.stat()
            with path.open("r+b") as f:  # root may, whatever the mode
                for at in range(0, info.st_size, 50_000):
                    f.seek(at)
                    f.write(b"\xaa\x55\xaa")
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))  # else the service notices and serves it no more
    wipe(nodes, 3)
    before = nodes.from_store()
    nodes.load(3)
    status = nodes.running[3].status()
    assert status["load"]["peer_lies"] >= 2
    assert set(status["peers"]["marked"]) == {nodes.sockets[0], nodes.sockets[1]}
    assert "expected" in status["peers"]["marked"][nodes.sockets[0]]
    assert nodes.from_store() == before, "the honest peer still had everything"


def test_d_peer_that_dies_in_the_middle_is_replaced(nodes: Nodes) -> None:
    wipe(nodes, 3, DEADLINE_S)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(nodes.load, 3)
        nodes.running[2].kill()
        loading.result(60)
    nodes.load(3)
