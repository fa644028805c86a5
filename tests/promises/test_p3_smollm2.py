"""P3 on the sample model (SmolLM2, fp32 and bf16): sizes up to 8k tokens, failures injected at 1k."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.kvtools import kv
from tests.kvtools.azure import Store, free_port, new_container, shared
from tests.kvtools.engines import Driver, Engine
from tests.kvtools.proxy import FaultProxy, wait_for
from tests.kvtools.text import ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SIZES = (300, 1000, 2048, 4000, 8000) if os.environ.get("DYNAMO_BLOB_LONG") else (300, 1000)


class Bed:
    def __init__(self, driver: Driver, store: Store, proxy: FaultProxy) -> None:
        self.driver, self.store, self.proxy, self.container = driver, store, proxy, new_container(store)
        settings = kv.settings(
            store, port=proxy.port, container=self.container, dram_bytes=512 << 20, staging_bytes=64 << 20, load_deadline_s=40.0,
            lookup_deadline_s=20.0, store_deadline_s=100.0, breaker_errors=99,  # 41 MB through a Python proxy take a busy machine long
        )  # fmt: skip
        args = kv.engine_args(settings, dtype="float32", max_model_len=8192, kv_cache_memory_bytes=1 << 30)
        self.engine: Engine = driver.engine("smol", "smollm2-135m-instruct", **args)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    store = shared()
    with FaultProxy(store.port, free_port()) as proxy, Driver(tmp_path_factory.mktemp("driver")) as driver:
        yield Bed(driver, store, proxy)
        proxy.heal()


@pytest.mark.parametrize("n", SIZES)
def test_sizes(bed: Bed, n: int) -> None:
    prompt, engine = ids(n + 5, seed=n), bed.engine
    before = len(kv.chunks(bed.store, bed.container))
    cold = engine.generate(prompt, timeout=600)
    kv.wait_stored_in(bed.store, bed.container, before + n // 128, 120)
    hbm = engine.generate(prompt)
    assert hbm["tokens"] == cold["tokens"], "fp32: a hit's tokens equal a cold run's"
    print(f"{n}: run-to-run band {kv.band(hbm, engine.generate(prompt))}, cold to hit {kv.band(cold, hbm)}")
    for dram in (False, True):
        engine.forget(dram=dram)
        hit = engine.generate(prompt)
        assert hit["cached"] == hbm["cached"] == n // 128 * 128 and kv.same(hit, hbm), kv.band(hit, hbm)


@pytest.mark.parametrize(
    "fault,arg", [("status", 403), ("flip", 70000), ("cut", 70000), ("stall", 70000), ("other", 0)]
)
def test_failures_at_1k(bed: Bed, fault: str, arg: int | str) -> None:
    prompt, engine = ids(1005, seed=1000), bed.engine
    want = engine.generate(prompt)
    names = kv.wait_stored_in(bed.store, bed.container, 7, 60)
    engine.forget(dram=True)
    rule = bed.proxy.fault(
        fault,
        f"/kvtest/{bed.container}/{names[0]}" if fault == "other" else arg,
        methods=("GET",),
        match="kv-",
        count=3,
    )
    got = engine.generate(prompt)
    bed.proxy.heal()
    assert rule.hits > 0 and got["tokens"] == want["tokens"] and kv.band(got, want) < 1e-3


def test_waiting_for_a_load_costs_little_cpu(bed: Bed) -> None:
    """The engine, its worker and the driver around them took a whole core before; the transfers need it."""
    prompt, engine = ids(1005, seed=1000), bed.engine
    want = engine.generate(prompt)
    kv.wait_stored_in(bed.store, bed.container, 7, 60)
    engine.forget(dram=True)
    rule = bed.proxy.fault("hold", methods=("GET",), match="kv-")
    running = engine.begin(prompt)
    wait_for(lambda: rule.hits >= 4, 60, "its chunks are held")
    before = bed.driver.cpu_s()
    time.sleep(2.0)
    spent = bed.driver.cpu_s() - before
    bed.proxy.heal()
    got = running.result(180)
    assert got["tokens"] == want["tokens"] and got["cached"] == 7 * 128
    assert spent < 0.9, f"{spent:.2f} CPU seconds of 2 s"
