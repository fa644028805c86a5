"""TTFT by where the KV comes from, the floor under it, and what puts cost decode.

One engine on the sample model (fp32: a CPU without bf16 instructions computes bf16 forty times slower, 25 ms a token), one
request at a time, variants interleaved within each round: recompute (a salt of its own), hbm, dram, and blob behind the proxy:
Azurite, Azurite at three byte rates, the stand-in with copies of the same objects. `floor-*` moves as many objects through the
same proxy, transport, staging copy and proof without an engine. The step is an HBM hit. Goal: blob <= 1.2 x floor + step.
Decode: four answers at once with puts going on, and without a tier. `--quick`: every length, fewer rounds.
"""

from __future__ import annotations

import queue
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.report import Report
from bench.standin import StandIn
from components.common.kv.config import KvTiersConfig
from components.common.kv.keys import object_name
from components.common.kv.mover import Mover, Unit
from components.common.kv.objects import Codec
from components.common.kv.opened import staging_pool
from components.common.kv.stores import blob_transport
from tests.kvtools import kv
from tests.kvtools.azure import NAME, Store, azurite, free_port, new_container
from tests.kvtools.engines import Driver, Engine
from tests.kvtools.proxy import FaultProxy
from tests.kvtools.text import ids

MODEL = "smollm2-135m-instruct"
ROW = 46080 * 128
RATES = {"blob-200MBps": 200e6, "blob-100MBps": 100e6, "blob-40MBps": 40e6}
THREADS = 8
"""Requests in flight: a rate of the proxy is for each."""


class Bed:
    """Store, stand-in, proxy and the bare transfer, all for one container."""

    def __init__(self, work: Path, store: Store, proxy: FaultProxy) -> None:
        self.store, self.proxy, self.work = store, proxy, work
        self.container = new_container(store)
        self.settings = kv.settings(
            store, port=proxy.port, container=self.container, dram_bytes=1 << 30, staging_bytes=128 << 20, load_deadline_s=120.0,
            store_deadline_s=120.0, store_queue=128, lookup_deadline_s=10.0, weights_digest="cd" * 32, threads=THREADS,
        )  # fmt: skip
        self.standin = StandIn(work / "standin", account=NAME).start()
        self.floor = Floor(store, proxy, self.settings, self.container)

    def set(self, variant: str) -> None:
        """Which server answers reads of chunks, and how fast."""
        self.proxy.heal()
        if variant == "blob-standin":
            self.proxy.fault("upstream", self.standin.port, methods=("GET", "HEAD"), match="/" + "0" * 32 + "/")
        elif variant in RATES:
            self.proxy.fault("throttle", RATES[variant] / THREADS, methods=("GET",))

    def mirror(self) -> None:
        """Copies chunks to the stand-in that it does not have."""
        account = self.store.account()
        for name in kv.chunks(self.store, self.container):
            path = self.work / "standin" / self.container / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(account.get(self.container, name))


def bench(report: Report, quick: bool) -> None:
    report.server = "blob-azurite and blob-*MBps: azurite behind the fault proxy (unbounded, or at that rate); blob-standin: the stand-in behind it"
    with tempfile.TemporaryDirectory(prefix="dynamo-blob-bench-kv-") as name:
        work = Path(name)
        with azurite(work / "azurite") as store, FaultProxy(store.port, free_port()) as proxy, Driver(work) as driver:
            bed = Bed(work, store, proxy)
            args = kv.engine_args(bed.settings, dtype="float32", max_model_len=8192, kv_cache_memory_bytes=1 << 30)
            with driver.engine("kv", MODEL, **args) as engine:
                for n in (512, 1024, 2048, 4096, 8000):
                    _ttft(report, engine, bed, n, 5 if not quick else 3 if n < 2048 else 2, quick and n > 2048)
                bed.set("blob-azurite")
                plain = {k: v for k, v in args.items() if k != "kv_transfer_config"}
                with driver.engine("off", MODEL, **plain) as off:
                    _decode(report, engine, off, 3 if quick else 5)
            bed.floor.close()
            bed.standin.close()


class Floor:
    """Reads objects like the tier does, without an engine."""

    def __init__(self, store: Store, proxy: FaultProxy, settings: dict[str, Any], container: str) -> None:
        config = KvTiersConfig.parse(settings)
        pool = staging_pool(config, ROW)
        self.transport = blob_transport(store.account(proxy.port), container, pool, config)
        self.mover = Mover(pool, Codec(ROW), workers=config.workers, store_queue=1000)
        self.rows: np.ndarray[Any, Any] = np.zeros((64, ROW), np.uint8)
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def close(self) -> None:
        self.mover.close(5.0)
        self.transport.close(5.0)

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


def _ttft(report: Report, engine: Engine, bed: Bed, n: int, rounds: int, first_counts: bool) -> None:
    """`first_counts`: the request that fills the store is the one sample of `recompute`, with what a new length brings."""
    cell, chunks = f"{n} tokens", n // 128
    prompt = ids(n + 7, seed=n)
    before = len(kv.chunks(bed.store, bed.container))
    bed.set("blob-azurite")
    first = float(engine.generate(prompt, timeout=300, max_tokens=2)["ttft"])
    kv.wait_stored_in(bed.store, bed.container, before + chunks, 120)
    bed.floor.run(chunks, store=True)
    bed.mirror()

    def cold(r: int) -> float:
        return float(engine.generate(prompt, timeout=300, max_tokens=2, salt=f"r{n}-{r}", kv={"tenant": ""})["ttft"])

    taken: dict[str, list[float]] = {}
    for r in range(rounds):
        values = {} if first_counts else {"recompute": cold(r)}
        if first_counts and not r:
            values["recompute"] = first
        engine.forget()
        values["dram"] = _hit(engine, prompt, chunks)
        values["hbm"] = _hit(engine, prompt, chunks)
        for variant in ("blob-azurite", "blob-standin", *RATES):
            bed.set(variant)
            engine.forget(dram=True)
            values[variant] = _hit(engine, prompt, chunks)
            values[variant.replace("blob", "floor")] = bed.floor.run(chunks)
        for variant, value in values.items():
            report.add(cell, variant, r, value, "s")
            taken.setdefault(variant, []).append(value)
    for variant in [v for v in taken if v.startswith("blob")]:
        tier, floor = median(taken[variant]), median(taken[variant.replace("blob", "floor")])
        goal = 1.2 * floor + median(taken["hbm"])
        report.note(
            f"{cell}, {variant}: {tier:.3f} s, goal 1.2 x {floor:.3f} + step = {goal:.3f} s: {'met' if tier <= goal else 'missed'}"
        )


def _hit(engine: Engine, prompt: list[int], chunks: int) -> float:
    got = engine.generate(prompt, max_tokens=2)
    assert got["cached"] == chunks * 128, f"a hit of {chunks} chunks was wanted, {got['cached']} tokens came"
    return float(got["ttft"])


def _decode(report: Report, on: Engine, off: Engine, rounds: int) -> None:
    """Tokens per second of four answers at once, with puts going on and without a tier."""
    for r in range(rounds):
        for variant, engine in (("puts on", on), ("puts off", off)) if r % 2 else (("puts off", off), ("puts on", on)):
            began = time.monotonic()
            running = [engine.begin(ids(256, seed=9000 + 10 * r + i), max_tokens=130, logprobs=None) for i in range(4)]
            tokens = sum(len(f.result(300)["tokens"]) for f in running)
            report.add("decode 4 x 130", variant, r, tokens / (time.monotonic() - began), "tokens/s")
