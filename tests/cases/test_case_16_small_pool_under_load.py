"""Case 16 (vllm#45704, dynamo#5068): offload races under load. A tiny HBM and DRAM pool, and every fault of the store at once:
every answer equals its cold run, every request ends.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.kvtools import kv
from tests.kvtools.azure import Store, free_port, new_container, shared
from tests.kvtools.engines import Driver, Engine
from tests.kvtools.proxy import FaultProxy, wait_for
from tests.kvtools.text import ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PREFIXES = [ids(384, seed=s) for s in range(6)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, FaultProxy, Store, dict]]:
    store = shared()
    with FaultProxy(store.port, free_port()) as proxy, Driver(tmp_path_factory.mktemp("driver")) as driver:
        settings = kv.settings(
            store, port=proxy.port, container=new_container(store), dram_bytes=2 << 20, load_deadline_s=2.0, store_deadline_s=4.0,
            lookup_deadline_s=0.5, breaker_errors=3,
        )  # fmt: skip
        args = kv.engine_args(settings, max_num_batched_tokens=512, kv_cache_memory_bytes=4 << 20)  # 32 blocks, 16 rows
        with driver.engine("small", "tiny-full", **args) as engine:
            prompts = [PREFIXES[i % 6] + ids(30 + i, seed=100 + i) for i in range(24)]
            cold = {i: engine.generate(p, salt=f"cold{i}", kv={"tenant": ""}) for i, p in enumerate(prompts)}
            yield engine, proxy, store, {"prompts": prompts, "cold": cold}
        proxy.heal()


def wave(engine: Engine, work: dict, seed: int) -> int:
    """All prompts at once in random order; wrong answers. Batches round differently: a near tie may fall the other way."""
    order = list(range(24))
    random.Random(seed).shuffle(order)
    running = {i: engine.begin(work["prompts"][i]) for i in order}
    wrong = 0
    for i, future in running.items():
        got, cold = future.result(120), work["cold"][i]
        assert got["finish"] == "length" and len(got["tokens"]) == 16, "a request was lost"
        wrong += got["tokens"] != cold["tokens"] and kv.band(got, cold) > 1e-3
    return wrong


def test_waves_through_a_tiny_pool(rig) -> None:
    engine, proxy, _, work = rig
    proxy.heal()
    for seed in range(3):
        engine.forget(dram=False)  # HBM is empty: what a wave finds, it finds in the tiers
        assert wave(engine, work, seed) == 0
    sources = engine.sources()
    print("prompt tokens by source:", sources)
    assert sources["external_kv_transfer"] > 0, "the tiers were used at all"


@pytest.mark.parametrize(
    "fault,arg",
    [
        ("status", 503),
        ("stall", 4000),
        ("cut", 4000),
        ("truncate", 1000),
        ("flip", 9000),
        ("reset", 0),
        ("hang", 0),
        ("status", 403),
    ],
)
def test_faults_of_the_store_cost_no_answer(rig, fault: str, arg: int) -> None:
    engine, proxy, _, work = rig
    proxy.heal()
    engine.forget(dram=True)
    proxy.fault(fault, arg, match="kv-")
    assert wave(engine, work, arg) == 0
    proxy.heal()


def test_store_killed_and_restarted_under_load(rig) -> None:
    engine, proxy, store, work = rig
    proxy.heal()
    engine.forget(dram=True)
    running = [engine.begin(p) for p in work["prompts"][:8]]
    store.kill()
    more = [engine.begin(p) for p in work["prompts"][8:16]]
    store.start()
    for i, future in enumerate([*running, *more]):
        got = future.result(120)
        assert got["finish"] == "length" and (
            got["tokens"] == work["cold"][i]["tokens"] or kv.band(got, work["cold"][i]) < 1e-3
        )
    wait_for(lambda: engine.metrics("vllm:dynamo_blob_kv_read_breaker_open") is not None, 5)
    assert wave(engine, work, 99) == 0
