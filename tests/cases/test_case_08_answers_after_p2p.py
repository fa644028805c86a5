"""Case 8 (MX PR#199, #225): an MLA model loaded from a peer answered garbage, because derived tensors were not sent.

Here a peer sends the release's own bytes, proven by the manifest, and every engine derives for itself. The same
model is loaded from Blob and from another node's cache: what lies in the model and what it answers must be equal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.standin import StandIn
from components.common.loading.files import materialise_small_files
from components.common.loading.report import Report
from components.common.loading.session import open_session
from components.common.registry.manifest import Manifest
from tests.faults.releases import digests, make_release, weights_config
from tests.faults.services import ServiceProcess
from tests.kvtools.engines import MODELS, Driver
from tests.kvtools.text import ids
from tools.tiny_model import build


class Nodes:
    """A store and weight services with caches of their own, as if on several nodes."""

    def __init__(self, root: Path, layout: str) -> None:
        model = MODELS / f"tiny-{layout}"
        build(layout, model, MODELS / "smollm2-135m-instruct")
        self.root = root
        self.manifest: Manifest = make_release(root / "store", model, range_bytes=1 << 18)
        self.store = StandIn(root / "store").start()
        self.sockets = [f"unix:{root}/s/weights-{i}.sock" for i in range(2)]
        self.running: list[ServiceProcess] = []

    def start(self, i: int, **more: Any) -> ServiceProcess:
        service = ServiceProcess(
            self.root / "s", weights_config(self.store.url, self.root / f"w{i}", self.manifest), name=f"weights-{i}",
            cache_dir=str(self.root / f"cache{i}"), cache_bytes=1 << 30, peers=tuple(self.sockets),
            peer_deadline_s=300.0,  # not what is tested: a busy machine must not make a range come from Blob
            **more,
        ).start(90)  # fmt: skip
        self.running.append(service)
        return service

    def weights(self, name: str, service: str = "") -> dict[str, Any]:
        config = weights_config(
            self.store.url, self.root / name, self.manifest, service=service, report=str(self.root / f"{name}.json")
        )
        return {
            "model": str(materialise_small_files(config)), "load_format": "dynamo_blob",
            "model_loader_extra_config": {"weights": config.model_dump(mode="json")},
        }  # fmt: skip

    def sources(self, name: str) -> dict[str, int]:
        found = json.loads((self.root / f"{name}.json").read_text())["bytes_by_source"]
        return {k: v for k, v in found.items() if k != "local_small_files"}

    def from_store(self) -> int:
        return sum(v for k, v in self.store.served.items() if "objects" in k)

    @property
    def bytes(self) -> int:
        return sum(f.size for f in self.manifest.files if f.path.endswith(".safetensors"))

    def close(self) -> None:
        for service in self.running:
            service.stop()
        self.store.close()


@pytest.fixture
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    n = Nodes(tmp_path, request.param)
    yield n
    n.close()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """vLLM, imported once for both models."""
    with Driver(tmp_path_factory.mktemp("driver")) as d:
        yield d


def fill(nodes: Nodes, i: int) -> dict[str, str]:
    """Load through node i's service, without an engine; digests of all tensors."""
    config = weights_config(nodes.store.url, nodes.root / f"fill{i}", nodes.manifest, service=nodes.sockets[i])
    with open_session(config, None, Report()) as session:
        return digests(dict(session.tensors()))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", ["latent", "full"], indirect=True)
def test_the_canary_answers_the_same_and_the_same_tensors_lie_in_the_model(nodes: Nodes, driver: Driver) -> None:
    seen: dict[str, tuple[Any, dict[str, str]]] = {}
    extension = {"worker_extension_cls": "tests.kvtools.placed.Placed", "dtype": "bfloat16", "block_size": 128}
    for name in ("blob", "peer"):
        if name == "peer":
            nodes.start(0)
            fill(nodes, 0)
            before = nodes.from_store()
            nodes.start(1)
        weights = nodes.weights(name, nodes.sockets[1] if name == "peer" else "")
        small = nodes.from_store() - (before if name == "peer" else 0)
        with driver.engine(name, weights.pop("model"), **weights, **extension) as engine:
            answers = [engine.generate(ids(n, seed=n), max_tokens=24) for n in (40, 300)]
            placed = driver.call("rpc", name=name, method="placed_digests")
        seen[name] = [(a["tokens"], a["logprobs"]) for a in answers], placed
    assert nodes.sources("blob") == {"blob": nodes.bytes}
    assert nodes.sources("peer") == {"cache": nodes.bytes}
    assert nodes.running[1].status()["load"]["bytes_by_source"] == {"peer": nodes.bytes}
    assert nodes.from_store() == before + small, "the second node took no weight byte from Blob"
    assert len(seen["blob"][1]) > 15
    assert seen["peer"][1] == seen["blob"][1], "what lies in the model"
    assert seen["peer"][0] == seen["blob"][0], "tokens and logprobs of the canaries"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can alter a cache file unnoticed")
@pytest.mark.parametrize("nodes", ["latent"], indirect=True)
def test_one_flipped_byte_at_the_peer_is_never_used(nodes: Nodes) -> None:
    nodes.start(0, seal=False)  # sealing would read the altered file, and serve it no more
    wanted = fill(nodes, 0)
    path = max((nodes.root / "cache0/objects").iterdir(), key=lambda p: p.stat().st_size)
    info = path.stat()
    with path.open("r+b") as f:
        f.seek(info.st_size // 2)
        byte = f.read(1)
        f.seek(info.st_size // 2)
        f.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))  # else the service notices and serves it no more
    nodes.start(1)
    before = nodes.from_store()
    assert fill(nodes, 1) == wanted
    status = nodes.running[1].status()
    assert status["load"]["peer_lies"] >= 1 and list(status["peers"]["marked"]) == [nodes.sockets[0]]
    assert nodes.from_store() > before, "the range came from Blob"
