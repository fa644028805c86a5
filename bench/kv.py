"""TTFT by where the KV comes from, the floor under it, and what puts cost decode.

One engine at a time on the sample model (bf16), one request at a time, variants interleaved within each round: recompute
(a salt of its own), hbm, dram, blob behind Azurite and behind the fault proxy at fixed byte rates, and blob on the
stand-in. `floor` moves the same objects through the same transport and proof without an engine; `step` is the shortest
engine step (an HBM hit). Goal: blob <= 1.2 x floor + step.
"""

from __future__ import annotations

import queue
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import Report
from components.common.kv.config import KvTiersConfig
from components.common.kv.keys import object_name
from components.common.kv.mover import Mover, Unit
from components.common.kv.objects import Codec
from components.common.kv.opened import staging_pool
from components.common.kv.stores import blob_transport
from tests.kvtools import kv
from tests.kvtools.azure import Store, azurite, free_port, new_container
from tests.kvtools.engines import Driver, Engine
from tests.kvtools.proxy import FaultProxy, wait_for
from tests.kvtools.text import ids

MODEL = "smollm2-135m-instruct"
ROW = 23040 * 128
RATES = {"blob-200MBps": 200e6, "blob-60MBps": 60e6, "blob-20MBps": 20e6}


def bench(report: Report, quick: bool) -> None:
    lengths = (512, 1024, 2048) if quick else (512, 1024, 2048, 4096, 8000)
    rounds = 3 if quick else 5
    report.server = "azurite; blob-*MBps = Azurite behind the fault proxy at that rate; see notes for what Azurite caps"
    with tempfile.TemporaryDirectory(prefix="dynamo-blob-bench-kv-") as name:
        work = Path(name)
        with azurite(work / "azurite") as store, FaultProxy(store.port, free_port()) as proxy:
            container = new_container(store)
            settings = kv.settings(
                store, port=proxy.port, container=container, dram_bytes=512 << 20, staging_bytes=64 << 20, load_deadline_s=120.0,
                weights_digest="cd" * 32,
            )  # fmt: skip
            floor = Floor(store, proxy, settings, container)
            with Driver(work) as driver:
                args = kv.engine_args(settings, dtype="bfloat16", max_model_len=8192, kv_cache_memory_bytes=1 << 30)
                with driver.engine("kv", MODEL, **args) as engine:
                    for n in lengths:
                        _ttft(report, engine, store, proxy, floor, container, n, rounds)
                _decode(report, driver, args, rounds)
    report.note("floor: same objects, same transport, staging copy and digest, no engine; step: TTFT of an HBM hit")


class Floor:
    """Reads objects like the tier does, without an engine."""

    def __init__(self, store: Store, proxy: FaultProxy, settings: dict[str, Any], container: str) -> None:
        config = KvTiersConfig.parse(settings)
        pool = staging_pool(config, ROW)
        self.transport = blob_transport(store.account(proxy.port), container, pool, config)
        self.mover = Mover(pool, Codec(ROW), workers=2, store_queue=1000)
        self.rows = np.zeros((64, ROW), np.uint8)
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def names(self, n: int) -> list[str]:
        return [object_name("0" * 32, "f" * 32, i.to_bytes(32, "big")) for i in range(n)]

    def run(self, n: int, store: bool = False) -> float:
        began = time.monotonic()
        for i, name in enumerate(self.names(n)):
            unit = Unit(
                store, self.transport, name, self.rows[i], began + 120, lambda u, reason: self._done.put(reason)
            )
            (self.mover.store if store else self.mover.load)(unit)
        ends = [self._done.get(timeout=130) for _ in range(n)]
        assert ends == ["ok"] * n, ends
        return time.monotonic() - began


def _ttft(
    report: Report, engine: Engine, store: Store, proxy: FaultProxy, floor: Floor, container: str, n: int, rounds: int
) -> None:
    cell, chunks = f"{n} tokens", n // 128
    prompt = ids(n + 7, seed=n)
    before = len(kv.chunks(store, container))
    engine.generate(prompt, max_tokens=2)
    kv.wait_stored_in(store, container, before + chunks, 120)
    floor.run(chunks, store=True)
    for r in range(rounds):
        report.add(
            cell,
            "recompute",
            r,
            engine.generate(prompt, max_tokens=2, salt=f"r{n}-{r}", kv={"tenant": ""})["ttft"],
            "s",
        )
        engine.generate(prompt, max_tokens=2)
        report.add(cell, "hbm", r, engine.generate(prompt, max_tokens=2)["ttft"], "s")
        engine.forget()
        report.add(cell, "dram", r, _hit(engine, prompt, chunks), "s")
        for variant, rate in {"blob-azurite": 0.0, **RATES}.items():
            proxy.heal()
            if rate:
                proxy.fault("throttle", rate / 8, methods=("GET",))
            engine.forget(dram=True)
            report.add(cell, variant, r, _hit(engine, prompt, chunks), "s")
            report.add(cell, f"floor-{variant.removeprefix('blob-')}", r, floor.run(chunks), "s")
        proxy.heal()


def _hit(engine: Engine, prompt: list[int], chunks: int) -> float:
    got = engine.generate(prompt, max_tokens=2)
    assert got["cached"] == chunks * 128, f"a hit of {chunks} chunks was wanted, {got['cached']} tokens came"
    return float(got["ttft"])


def _decode(report: Report, driver: Driver, args: dict[str, Any], rounds: int) -> None:
    """Tokens per second of four answers at once, with puts going on and without a tier."""
    plain = {k: v for k, v in args.items() if k != "kv_transfer_config"}
    with driver.engine("on", MODEL, **args) as on, driver.engine("off", MODEL, **plain) as off:
        for r in range(rounds):
            for variant, engine in (
                (("puts on", on), ("puts off", off)) if r % 2 else (("puts off", off), ("puts on", on))
            ):
                began = time.monotonic()
                running = [
                    engine.begin(ids(256, seed=9000 + 10 * r + i), max_tokens=130, logprobs=None) for i in range(4)
                ]
                tokens = sum(len(f.result(300)["tokens"]) for f in running)
                report.add("decode 4 x 130", variant, r, tokens / (time.monotonic() - began), "tokens/s")
    wait_for(lambda: True, 1)
