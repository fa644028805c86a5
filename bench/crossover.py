"""`bench crossover`: load or recompute on the real engine, behind a store of three speeds, then after a sudden change.

    python -m bench.crossover [--model tiny-full] [--lengths 1024,4096] [--rates 1,4,16] [--rounds N] [--json FILE]

Variants `auto`, `load`, `recompute` interleaved, one request at a time, HBM and DRAM emptied before each. The forced
variants teach the policy nothing. Azurite stores; the fault proxy makes it slow (bytes per second over all
connections ≈ rate). For every pair the ratio auto ÷ better is taken in the same round.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from bench.report import Report
from components.common.kv.keys import PUBLIC
from tests.faults.proxy import FaultProxy, Rule
from tests.kvtools import kv
from tests.kvtools.azure import Store, azurite
from tests.kvtools.engines import Driver, Engine
from tests.kvtools.text import ids

ROOT = Path(__file__).parents[1]
VARIANTS = ("auto", "load", "recompute")
LEARN = 20
THREADS = 4


class Bed(NamedTuple):
    """An engine with the cost policy over a store that can be made slow."""

    engine: Engine
    store: Store
    proxy: FaultProxy
    status: Path

    def speed(self, bytes_per_s: float, latency_s: float = 0.03) -> None:
        """The store's speed from now on; 0 = as fast as Azurite."""
        rate = bytes_per_s / THREADS
        self.proxy.rules = (
            [Rule("cap", match=r"GET .*/[0-9a-f]{2}/", rate=rate, seconds=latency_s)] if bytes_per_s else []
        )

    def explain(self) -> dict[str, Any]:
        return json.loads(self.status.read_text()) if self.status.exists() else {}


def policy(hardware: dict[str, Any], status: Path, **more: Any) -> dict[str, Any]:
    return {
        "module": "components.common.kv.policy", "class": "CostPolicy", "status_file": str(status), "hardware": hardware,
        "tiers": [
            {"name": "dram", "fixed_s": 0.02, "bytes_per_s": 3e9, "spread": 1.0},
            {"name": "blob", "fixed_s": 0.05, "bytes_per_s": 20e6, "spread": 1.0, "via": "dram"},
        ], **more,
    }  # fmt: skip


def hardware(name: str = "cpu-smollm2") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "hardware" / f"{name}.yaml").read_text())
    return found


@contextmanager
def bed(work: Path, model: str, longest: int, step_tokens: int = 2048, **cost: Any) -> Iterator[Bed]:
    """A running engine. Holds the machine's engine lock while it lives."""
    status = work / "cost.json"
    with azurite(work / "azurite") as store, Driver(work) as driver:
        store.account().ensure_container(kv.CONTAINER)
        proxy = FaultProxy("127.0.0.1", store.port).start()
        settings = kv.settings(
            store, port=proxy.port, dram_bytes=768 << 20 if model.startswith("smol") else 64 << 20, staging_bytes=64 << 20,
            threads=THREADS, load_deadline_s=60.0, store_queue=256, policy=policy(hardware(), status, **cost),
        )  # fmt: skip
        args = kv.engine_args(
            settings, max_model_len=longest, max_num_batched_tokens=step_tokens, kv_cache_memory_bytes=(1 << 30)
        )
        with driver.engine("a", model, **args) as engine:
            yield Bed(engine, store, proxy, status)
        proxy.close()


def serve(b: Bed, prompt: list[int], variant: str) -> dict[str, Any]:
    """One request alone; what it needed and where its prefix came from."""
    b.engine.forget(dram=True)
    params = {"tenant": PUBLIC} | ({} if variant == "auto" else {"kv_cost_mode": variant})
    return b.engine.generate(prompt, timeout=400.0, max_tokens=1, logprobs=None, kv=params)


def first_stored(b: Bed) -> int:
    """Chunks in the store once it takes some: until the purge generations were read, an engine stores nothing."""
    for attempt in range(30):
        serve(b, ids(256, seed=900 + attempt), "auto")
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            if len(kv.chunks(b.store)) >= 2:
                return len(kv.wait_stored(b.store, 2))
            time.sleep(0.1)
    raise RuntimeError("no chunk reaches the store")


def store_all(b: Bed, prompts: dict[int, list[int]]) -> None:
    have = first_stored(b)
    for n, prompt in prompts.items():
        serve(b, prompt, "recompute")
        have += n // 128
        kv.wait_stored(b.store, have, 60.0)


def rounds(
    b: Bed, report: Report, cell: str, prompts: dict[int, list[int]], count: int, seed: int
) -> list[dict[str, Any]]:
    """`count` rounds of every length in every variant, order shuffled; returns one record per length and round."""
    rng, out = random.Random(seed), []
    for round_ in range(count):
        for n, prompt in prompts.items():
            record: dict[str, Any] = {"cell": cell, "tokens": n, "round": round_}
            for variant in rng.sample(VARIANTS, len(VARIANTS)):
                answer = serve(b, prompt, variant)
                record[variant], record[f"{variant}_loaded"] = answer["ttft"], answer["cached"]
                report.add(f"{cell} {n}", variant, round_, answer["ttft"], "s")
            out.append(record)
    return out


def judge(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Where the two ways differ by more than 25 % in the cell's medians: how often auto took the better one."""
    cells: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for r in records:
        cells.setdefault((r["cell"], r["tokens"]), []).append(r)
    right = clear = 0
    ratios = []
    for rs in cells.values():
        load, compute = median(r["load"] for r in rs), median(r["recompute"] for r in rs)
        ratios += [r["auto"] / (r["load"] if load < compute else r["recompute"]) for r in rs]
        if max(load, compute) > 1.25 * min(load, compute):
            clear += len(rs)
            right += sum((r["auto_loaded"] > 0) == (load < compute) for r in rs)
    low, high = bootstrap(ratios)
    return {"decisions": clear, "right": right, "ratio_median": median(ratios), "ratio_low": low, "ratio_high": high}


def bootstrap(values: Sequence[float], draws: int = 500) -> tuple[float, float]:
    """95 % interval of the median."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench crossover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-full", help="directory under .state/models")
    parser.add_argument("--lengths", default="1024,2048,4096,7936", help="prompt tokens")
    parser.add_argument("--rates", default="0.3,1.5,30", help="store speeds, MB/s")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", default="")
    args = parser.parse_args(argv)
    lengths = [int(n) for n in args.lengths.split(",")]
    rates = [float(r) for r in args.rates.split(",")]
    report = Report("crossover", server="azurite behind the fault proxy")
    with tempfile.TemporaryDirectory() as work, bed(Path(work), args.model, max(lengths) + 128) as b:
        prompts = {n: ids(n, seed=n) for n in lengths}
        store_all(b, prompts)
        records = []
        for rate in rates:
            b.speed(rate * 1e6)
            began = time.monotonic()
            for i in range(LEARN):
                serve(b, prompts[lengths[i % len(lengths)]], "auto")
            records += rounds(b, report, f"{rate:g} MB/s", prompts, args.rounds, int(rate * 1000))
            report.note(f"{rate:g} MB/s: {time.monotonic() - began:.0f} s; {json.dumps(b.explain().get('tiers', {}))}")
        verdict = judge(records)
        report.note(json.dumps(verdict))
        report.note("speeds follow each other suddenly: each cell's first 20 requests are the ones it learns in")
        for n in lengths:  # per length, how auto ran at each speed
            report.note(
                f"{n}: " + "; ".join(f"{r['cell']} loaded {r['auto_loaded']}" for r in records if r["tokens"] == n)
            )
    print(report.table())
    if args.json:
        report.write(args.json)
    return 0 if verdict["right"] >= 0.95 * verdict["decisions"] else 1


if __name__ == "__main__":
    sys.exit(main())
