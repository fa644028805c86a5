"""What a forced miss costs with the store down, against no tier at all; and how long until hits are back after the outage.

Two engines with the sample model, one idle while the other answers; pairs interleaved, prompts never seen before. A sample is the
CPU seconds that one engine's own processes (EngineCore and Worker) spend from request to answer, so that other users of the
machine add noise but no bias. Fp32: the harder case, a CPU without bf16 instructions computes bf16 forty times slower.
vLLM's API process is shared by both and left out. Goal: at most 5 % more than without a tier.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from bench.report import Report
from tests.kvtools import kv
from tests.kvtools.azure import azurite, free_port, new_container
from tests.kvtools.engines import Driver, Engine
from tests.kvtools.proxy import FaultProxy
from tests.kvtools.text import ids

MODEL = "smollm2-135m-instruct"
KNOWN = ids(512 + 7, seed=1)
"""Stored before the outage."""


class Variant:
    def __init__(self, engine: Engine, pids: set[int]) -> None:
        self.engine, self.pids = engine, pids

    def cpu(self) -> float:
        """CPU seconds of the engine's threads until now, to the nanosecond; none of them ends between two samples."""
        total = 0
        for pid in self.pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def ask(self, prompt: list[int]) -> tuple[float, float]:
        """(CPU seconds, seconds to the first token) of a request that hits nothing."""
        before = self.cpu()
        got = self.engine.generate(prompt, max_tokens=2, logprobs=None)
        assert got["cached"] == 0
        return self.cpu() - before, float(got["ttft"])


def bench(report: Report, quick: bool) -> None:
    report.server = "azurite behind the fault proxy; down = the proxy resets every connection"
    with (
        tempfile.TemporaryDirectory(prefix="dynamo-blob-bench-outage-") as name,
        azurite(Path(name) / "azurite") as store,
        FaultProxy(store.port, free_port()) as proxy,
        Driver(Path(name)) as driver,
    ):
        container, status = new_container(store), Path(name) / "status.json"
        settings = kv.settings(
            store, port=proxy.port, container=container, dram_bytes=256 << 20, staging_bytes=32 << 20, weights_digest="cd" * 32,
            breaker_errors=3, breaker_open_s=1.0, breaker_max_open_s=30.0, status_file=str(status), epochs_refresh_s=5.0,
        )  # fmt: skip
        tree = psutil.Process(driver.process.pid)

        def start(variant: str, tier: bool) -> Variant:
            before = {p.pid for p in tree.children(recursive=True)}
            args = kv.engine_args(settings, dtype="float32", max_model_len=2048, kv_cache_memory_bytes=256 << 20)
            if not tier:
                del args["kv_transfer_config"]
            engine = driver.engine(variant, MODEL, **args)
            return Variant(engine, {p.pid for p in tree.children(recursive=True)} - before)

        down = start("down", True)
        down.engine.generate(KNOWN, max_tokens=2, logprobs=None)
        kv.wait_stored_in(store, container, 4, 60)
        none = start("none", False)
        proxy.fault("reset")
        began, tries = time.monotonic(), 0
        while not _open(status):
            tries += 1
            assert tries < 20, "the breaker does not open"
            down.engine.forget(dram=True)  # the index says that the store holds it: reads fail
            down.engine.generate([*KNOWN, *ids(tries, seed=7)], max_tokens=2, logprobs=None)
        report.add("outage", "breaker opens", 0, time.monotonic() - began, "s")
        report.add("outage", "breaker opens", 0, tries, "requests")
        _misses(report, {"store down": down, "no tier": none}, (256,) if quick else (256, 512, 1024), 16)
        _back(report, down.engine, proxy)
        down.engine.stop()
        none.engine.stop()


def _misses(report: Report, engines: dict[str, Variant], lengths: tuple[int, ...], rounds: int) -> None:
    for n in lengths:
        pairs = []
        for r in range(-1, rounds):  # the first pair of a length warms up
            cost = {}
            for variant in sorted(engines, reverse=bool(r % 2)):
                cost[variant], ttft = engines[variant].ask(ids(n, seed=10_000 + n + 2 * r))
                if r >= 0:
                    report.add(f"miss {n} tokens", variant, r, cost[variant], "CPU s")
                    report.add(f"miss {n} tokens, first token", variant, r, ttft, "s")
            if r >= 0:
                pairs.append(cost["store down"] / cost["no tier"])
        report.note(f"{n} tokens: CPU seconds, store down / no tier, median of {rounds} pairs: {median(pairs):.3f}")
    for r in range(2):
        before, began = {v: e.cpu() for v, e in engines.items()}, time.monotonic()
        time.sleep(5.0)
        for variant, engine in engines.items():
            report.add("idle", variant, r, (engine.cpu() - before[variant]) / (time.monotonic() - began), "CPU s per s")


def _back(report: Report, engine: Engine, proxy: FaultProxy) -> None:
    """The store answers again: seconds until a prompt stored before the outage comes from Blob. Nobody restarts anything."""
    proxy.heal()
    began = time.monotonic()
    while True:
        engine.forget(dram=True)
        if engine.generate(KNOWN, max_tokens=2, logprobs=None)["cached"] == 512:
            break
        assert time.monotonic() - began < 120, "no hit after the outage"
        time.sleep(0.2)
    report.add("outage", "hits again", 0, time.monotonic() - began, "s")


def _open(status: Path) -> bool:
    """By the tier's status file: a second engine in one process takes the first one's metrics away."""
    return bool(json.loads(status.read_text())["transport"]["read_breaker_open"])
