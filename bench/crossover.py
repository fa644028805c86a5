"""`bench crossover`: load or recompute on the real engine, behind a store of three speeds that change suddenly.

    python -m bench.crossover [--model tiny-full] [--lengths 1024:4,4096:1] [--longest 7936] [--rates 2.5,30,6] [--json FILE]

At each speed 20 `auto` requests to learn in (its first two lengths in turn), then rounds of `auto`, `load`, `recompute`
interleaved, one request at a time, HBM and DRAM emptied before each. The forced variants teach the policy nothing. Azurite
stores; the fault proxy makes it slow (bytes per second over all connections, about). `auto` is right where the ways'
medians differ by more than 25 % and it took the faster; for every round the ratio auto / faster way is taken. What `auto`
did is read from the engine's counters. Last: CPU seconds of prompts nobody holds, `auto` against `recompute`, in pairs.
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

import psutil
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
            threads=THREADS, load_deadline_s=300.0, store_queue=256, policy=policy(hardware(), status, **cost),
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


def counted(b: Bed) -> dict[str, float]:
    """The engine's own account of its decisions. Statistics come with a step, a few times a second."""
    time.sleep(0.3)
    serve(b, ids(20, seed=time.monotonic_ns()), "recompute")
    found = b.engine.metrics("vllm:dynamo_blob_kv_cost_")
    return {what: sum(v for k, v in found.items() if f"cost_{what}_total" in k) for what in ("requests", "loads")}


def rounds(
    b: Bed, report: Report, cell: str, prompts: dict[int, list[int]], counts: dict[int, int], seed: int
) -> list[dict[str, Any]]:
    """Rounds of every length in every variant, order shuffled; returns one record per length and round.

    counts   rounds of each length
    """
    rng, out = random.Random(seed), []
    before = counted(b)
    for round_ in range(max(counts.values())):
        for n in (n for n, count in counts.items() if round_ < count):
            record: dict[str, Any] = {"cell": cell, "tokens": n, "round": round_}
            for variant in rng.sample(VARIANTS, len(VARIANTS)):
                answer = serve(b, prompts[n], variant)
                record[variant], record[f"{variant}_loaded"] = answer["ttft"], answer["cached"]
                report.add(f"{cell} {n}", variant, round_, answer["ttft"], "s")
            report.add(f"{cell} {n} loaded", "auto", round_, record["auto_loaded"], "tokens")
            out.append(record)
    after = counted(b)
    told = {what: after[what] - before[what] for what in after}
    seen = {"requests": len(out), "loads": sum(r["auto_loaded"] > 0 for r in out)}
    if told != seen:
        report.note(f"{cell}: the engine counted {told}, its answers say {seen}")
    return out


def learn(
    b: Bed, report: Report, cell: str, prompts: dict[int, list[int]], lengths: Sequence[int]
) -> list[tuple[int, bool]]:
    """The first requests at a speed: (tokens, whether any were loaded) of each."""
    out = []
    for i in range(LEARN):
        n = lengths[i % len(lengths)]
        answer = serve(b, prompts[n], "auto")
        report.add(f"{cell} {n} learning", "auto", i, answer["ttft"], "s")
        out.append((n, answer["cached"] > 0))
    return out


def faster(records: Sequence[dict[str, Any]]) -> dict[tuple[str, int], str]:
    """The way that is faster by more than 25 %, by the medians of a cell; cells without one are left out."""
    cells: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for r in records:
        cells.setdefault((r["cell"], r["tokens"]), []).append(r)
    out = {}
    for key, rs in cells.items():
        load, compute = median(r["load"] for r in rs), median(r["recompute"] for r in rs)
        if max(load, compute) > 1.25 * min(load, compute):
            out[key] = "load" if load < compute else "recompute"
    return out


def judge(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the decisions in clear cells, how many were right; ratio auto / faster way of the same round, with an interval."""
    clear = faster(records)
    judged = [(r, clear[r["cell"], r["tokens"]]) for r in records if (r["cell"], r["tokens"]) in clear]
    right = sum((r["auto_loaded"] > 0) == (way == "load") for r, way in judged)
    ratios = [
        r["auto"] / (r[way] if (way := clear.get((r["cell"], r["tokens"]))) else min(r["load"], r["recompute"]))
        for r in records
    ]
    low, high = bootstrap(ratios)
    return {
        "decisions": len(judged),
        "right": right,
        "ratio_median": median(ratios),
        "ratio_low": low,
        "ratio_high": high,
    }


def unlearned(learned: Sequence[tuple[int, bool]], clear: dict[int, str]) -> bool:
    """One of the last three decisions in clear cells was wrong, or there was none to tell."""
    right = [loaded == (clear[n] == "load") for n, loaded in learned if n in clear]
    return len(right) < 3 or not all(right[-3:])


def last_wrong(learned: Sequence[tuple[int, bool]], clear: dict[int, str]) -> int:
    """How many requests the change of speed took: the number of the last wrong decision in a clear cell; 0 = none was.

    All of them: it was not learned, and the measured decisions say so.
    """
    wrong = [i for i, (n, loaded) in enumerate(learned, 1) if n in clear and loaded != (clear[n] == "load")]
    return max(wrong, default=0)


def forced_misses(b: Bed, report: Report, pids: set[int], pairs: int, tokens: int = 512) -> float:
    """CPU seconds of prompts that nobody holds: looked up and decided ÷ forced to recompute without a look, the median.

    Both run under our connector; `bench kv-outage` compares with an engine that has no tier.
    """
    ratios = []
    for r in range(-1, pairs):  # the first warms up
        spent = {}
        for variant in sorted(("auto", "recompute"), reverse=bool(r % 2)):
            prompt = ids(tokens, seed=50_000 + 2 * r + (variant == "auto"))
            before = cpu_seconds(pids)
            serve(b, prompt, variant)
            spent[variant] = cpu_seconds(pids) - before
            if r >= 0:
                report.add(f"miss {tokens}", variant, r, spent[variant], "CPU s")
        if r >= 0:
            ratios.append(spent["auto"] / spent["recompute"])
    low, high = bootstrap(ratios)
    report.note(
        f"forced miss, {tokens} tokens: CPU seconds with policy and lookup / without, median of {pairs} pairs "
        f"{median(ratios):.3f} ({low:.3f} to {high:.3f}); goal 1.05"
    )
    return median(ratios)


def cpu_seconds(pids: set[int]) -> float:
    """CPU seconds of the processes' threads until now."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def bootstrap(values: Sequence[float], draws: int = 500) -> tuple[float, float]:
    """95 % interval of the median."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


def run(
    report: Report, model: str, counts: dict[int, int], longest: int, rates: Sequence[float], pairs: int
) -> dict[str, Any]:
    """Learns, measures and judges at each of `rates` (MB/s); `longest` tokens once, at the fastest. Returns the verdict."""
    report.server = "azurite behind the fault proxy"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work, bed(Path(work), model, max(*counts, longest) + 128) as b:
        pids = {p.pid for p in psutil.Process(b.engine.driver.process.pid).children(recursive=True)}
        prompts = {n: ids(n, seed=n) for n in (*counts, *([longest] if longest else ()))}
        store_all(b, prompts)
        report.note(f"stored: {time.monotonic() - began:.0f} s")
        records, changes, late = [], {}, 0
        for rate in rates:
            cell = f"{rate:g} MB/s"
            b.speed(rate * 1e6)
            learned = learn(b, report, cell, prompts, list(counts)[:2])
            here = counts | ({longest: 1} if longest and rate == max(rates) else {})
            measured = rounds(b, report, cell, prompts, here, int(rate * 1000))
            clear = {n: way for (_, n), way in faster(measured).items()}
            changes[cell] = last_wrong(learned, clear)
            late += unlearned(learned, clear)
            told = b.explain()
            report.note(
                f"{cell}: until {time.monotonic() - began:.0f} s; faster {json.dumps(clear)}; {json.dumps(judge(measured))}; "
                f"loaded {[(r['tokens'], r['auto_loaded']) for r in measured]}; tiers {json.dumps(told.get('tiers', {}))}; "
                f"extrapolated {told.get('extrapolated')} of {told.get('requests')}"
            )
            records += measured
        b.speed(0)
        verdict = judge(records) | {
            "last_wrong": changes,
            "unlearned": late,
            "miss": forced_misses(b, report, pids, pairs),
        }
        report.note(json.dumps(verdict))
    return verdict


QUICK = ({512: 2, 1024: 1}, 0, (2.5, 30.0), 3)
FULL = ({512: 1, 1024: 4, 2048: 2, 4096: 1}, 7936, (2.5, 30.0, 6.0), 8)


def bench(report: Report, quick: bool) -> None:
    run(report, "smollm2-135m-instruct", *(QUICK if quick else FULL))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench crossover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="directory under .state/models")
    parser.add_argument("--lengths", default="512:1,1024:4,2048:2,4096:1", help="prompt tokens:rounds, comma-separated")
    parser.add_argument(
        "--longest", type=int, default=7936, help="prompt tokens of one round at the fastest speed; 0 = none"
    )
    parser.add_argument("--rates", default="2.5,30,6", help="store speeds in this order, MB/s")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of forced misses")
    parser.add_argument("--json", default="")
    args = parser.parse_args(argv)
    counts = {int(n): int(count) for n, _, count in (one.partition(":") for one in args.lengths.split(","))}
    report = Report("crossover")
    verdict = run(report, args.model, counts, args.longest, [float(r) for r in args.rates.split(",")], args.pairs)
    print(report.table())
    if args.json:
        report.write(args.json)
    held = verdict["decisions"] and verdict["right"] >= 0.95 * verdict["decisions"] and verdict["miss"] <= 1.05
    return 0 if held and not verdict["unlearned"] else 1


if __name__ == "__main__":
    sys.exit(main())
