"""P5: a worker that is killed in the middle of its load leaves nothing behind, and what was read for it is not lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.standin import StandIn
from components.common.loading.config import WeightsConfig
from components.common.loading.ranks import SHARED_DIR
from components.common.loading.report import Report
from components.common.loading.session import open_session
from components.common.registry.manifest import FileEntry, Manifest
from tests.faults import stores
from tests.faults.proxy import FaultProxy, Rule
from tests.faults.releases import MiB, digests, make_release, random_model, tensors_of, weights_config
from tests.faults.services import REPOSITORY, ServiceThread
from tests.kvtools.proxy import wait_for

store = stores.store

SHARDS = [tensors_of(s, [700_000, 1_500_000, 3, 900_000]) for s in range(3)]
WANTED = digests({k: v for s in SHARDS for k, v in s.items()})
SLOW = 100_000
"""Bytes per second of a range of the last file: its six, four at a time at most, leave ten seconds for the kill."""
PATIENCE_S = 60.0
WORKER = """
import os, sys, threading

import torch  # before the load: its seconds would go by between the first range and the first tensor
from components.common.loading.config import WeightsConfig
from components.common.loading.ranks import Ranks
from components.common.loading.report import Report
from components.common.loading.session import open_session

config, size, shared = WeightsConfig.model_validate_json(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def load(rank):
    kept, ranks = {}, Ranks(rank, size, f"{os.getpid()}-mid", shared) if size else None
    with open_session(config, None, Report(config.report), ranks=ranks) as session:
        for name, tensor in session.tensors():
            kept[name] = tensor
            if len(kept) == 1:
                os.write(1, b"first\\n")

threads = [threading.Thread(target=load, args=(rank,)) for rank in range(max(1, size))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    random_model(tmp_path / "model", SHARDS)
    return make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB // 2)


@pytest.fixture
def proxy(store: StandIn, manifest: Manifest) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", store.port) as p:
        yield p


def weights(manifest: Manifest) -> list[FileEntry]:
    return [f for f in manifest.files if f.path.endswith(".safetensors")]


def read(proxy: FaultProxy, manifest: Manifest) -> Counter[str]:
    """Bytes that left the store, by weight file, once nothing is on its way."""
    wait_for(lambda: not proxy.active, PATIENCE_S, "answers on their way")
    return Counter({f.path: proxy.by_target[f"/standin/weights/{f.blob}"] for f in weights(manifest)})


def config_of(proxy: FaultProxy, work: Path, manifest: Manifest, service: str = "") -> WeightsConfig:
    base = weights_config(
        proxy.url("standin"), work, manifest, service=service, range_in_flight=2, range_deadline_s=PATIENCE_S
    )
    return base.model_copy(update={"account": base.account.model_copy(update={"read_timeout_s": PATIENCE_S})})


def kill_in_the_middle(proxy: FaultProxy, tmp_path: Path, config: WeightsConfig, manifest: Manifest, ranks: int) -> int:
    """The pid of a loader that was killed with its first tensor in hand and the last file on its way."""
    temporary, shared, last = tmp_path / "tmp", tmp_path / "shm", weights(manifest)[-1]
    temporary.mkdir()
    shared.mkdir()
    slow = Rule("cap", rf"GET .*/objects/{last.blake3}", rate=SLOW)
    proxy.rules = [slow]
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, config.model_dump_json(), str(ranks), str(shared)], cwd=REPOSITORY, stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    try:
        assert worker.stdout is not None
        for _ in range(max(1, ranks)):
            assert worker.stdout.readline() == b"first\n"
        wait_for(lambda: slow.used > 0, PATIENCE_S, "the last file is on its way")
        wait_for(lambda: not list(shared.iterdir()), 5, "names of shared memory go while the load goes on")
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()
        proxy.rules, slow.rate = [], 1e9
    assert proxy.by_target[f"/standin/weights/{last.blob}"] < last.size, "in the middle"
    return worker.pid


def nothing_of(pid: int, tmp_path: Path) -> None:
    assert [p for d in ("tmp", "shm") for p in (tmp_path / d).rglob("*")] == []
    assert [p for p in Path(SHARED_DIR).iterdir() if str(pid) in p.name] == []
    assert {p.name for p in (tmp_path / "w").rglob("*")} == {"serving.sas"}


def load(config: WeightsConfig) -> dict[str, int]:
    """Where a whole load, checked tensor by tensor, got its bytes from."""
    report = Report()
    with open_session(config, None, report) as session:
        assert digests(dict(session.tensors())) == WANTED
    return dict(report.by_source)


def test_a_worker_of_the_node_cache_killed_in_the_middle(tmp_path: Path, proxy: FaultProxy, manifest: Manifest) -> None:
    once = {f.path: f.size for f in weights(manifest)}
    own = config_of(proxy, tmp_path / "service", manifest)
    with ServiceThread(tmp_path / "s", own, cache_dir=str(tmp_path / "cache"), cache_bytes=16 * MiB) as service:
        config = config_of(proxy, tmp_path / "w", manifest, service.socket)
        pid = kill_in_the_middle(proxy, tmp_path, config, manifest, 0)
        wait_for(lambda: service.status()["cache"]["leases"] == 0, PATIENCE_S, "it pins nothing any more", every=0.05)
        nothing_of(pid, tmp_path)
        assert load(config) == {"cache": sum(once.values())}
        assert read(proxy, manifest) == once, "both loads together read each byte once"
        assert list((tmp_path / "cache/partial").iterdir()) == []
        wait_for(lambda: service.status()["cache"]["leases"] == 0, PATIENCE_S, "nor does the second", every=0.05)


@pytest.mark.parametrize("ranks", [0, 2], ids=["alone", "two_ranks"])
def test_a_worker_that_reads_blob_itself_killed_in_the_middle(
    tmp_path: Path, proxy: FaultProxy, manifest: Manifest, ranks: int
) -> None:
    once = {f.path: f.size for f in weights(manifest)}
    config = config_of(proxy, tmp_path / "w", manifest)
    nothing_of(kill_in_the_middle(proxy, tmp_path, config, manifest, ranks), tmp_path)
    before = read(proxy, manifest)
    assert load(config) == {"blob": sum(once.values())}
    assert read(proxy, manifest) - before == once
