"""`bench simulate`: load or recompute on a virtual clock, 270 cells; the same policy code as in the engine.

    python -m bench.simulate [--quick] [--json FILE]

Per cell, mean seconds to the first token of the requests after the first 20: `auto`, `load`, `recompute`, a fixed
`threshold` tuned for the middle store speed, and the `oracle` (hindsight; --quick: the greedy one that knows the true
rates and each request's own luck).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from bench.report import Report
from bench.sim import drive, grid
from bench.sim.oracle import fixed_plan, greedy_plan, hindsight, mean_after
from bench.sim.world import Engine, Job, Store, run, workload

LEARN = 20


class Cell(NamedTuple):
    engine: str
    gb_per_s: float
    tokens: int
    load: float

    def __str__(self) -> str:
        return f"{self.engine} {self.gb_per_s:g} GB/s {self.tokens} load {self.load}"


class Outcome(NamedTuple):
    cell: Cell
    seconds: dict[str, float]
    probed_s: float
    explored_s: float

    @property
    def against_better(self) -> float:
        """auto ÷ the better of always-load and never-load."""
        return self.seconds["auto"] / min(self.seconds["load"], self.seconds["recompute"])

    @property
    def regret(self) -> float:
        return self.seconds["auto"] / self.seconds["oracle"] - 1


def cells() -> Iterator[Cell]:
    for name in grid.ENGINES:
        for speed in grid.SPEEDS[name]:
            for tokens in grid.LENGTHS:
                for load in grid.LOADS:
                    yield Cell(name, speed, tokens, load)


def seed_of(cell: Cell) -> int:
    """The same arrivals and luck for every store speed of a length."""
    return cell.tokens + int(cell.load * 10)


def measure(cell: Cell, requests: int, thorough: bool, seed: int = 0) -> Outcome:
    engine, store = grid.engine(cell.engine), grid.store(cell.gb_per_s)
    jobs = workload(engine, [cell.tokens] * requests, cell.load, seed_of(cell) + seed, store)
    auto, strategy = drive.auto(engine, lambda i: store, jobs, grid.config(cell.engine))
    seconds = {"auto": mean_after(auto, LEARN)}
    for name, decide in (("load", drive.always_load), ("recompute", drive.never_load)):
        seconds[name] = mean_after(run(engine, lambda i: store, jobs, decide), LEARN)
    seconds["oracle"] = best_known(engine, store, jobs, thorough)
    ledger = strategy.policy.ledger
    return Outcome(cell, seconds, ledger.probed_s, ledger.explored_s)


def best_known(engine: Engine, store: Store, jobs: Sequence[Job], thorough: bool) -> float:
    if thorough:
        return hindsight(engine, lambda i: store, jobs, LEARN)[0]
    return mean_after(fixed_plan(engine, lambda i: store, jobs, greedy_plan(engine, lambda i: store, jobs)), LEARN)


class Mixed(NamedTuple):
    """All nine lengths mixed on one engine and store: what a fixed threshold meets.

    `metric` "seconds" is the mean time to the first token, what the policy minimises and the cells report. "slowdown"
    divides each by the cold prompt's own prefill, so that short prompts count most: there a threshold that sends all
    long prompts to a slow store keeps the engine free for the short ones, and can beat auto. Both are reported.
    """

    metric: str

    engine: str
    gb_per_s: float
    auto: float
    threshold: float
    tokens: int


def mixed_jobs(
    name: str, speed: float, requests: int, load: float = 0.3
) -> tuple[Engine, Callable[[int], Store], list[Job]]:
    engine, store = grid.engine(name), grid.store(speed)
    lengths = [grid.LENGTHS[(i * 4) % len(grid.LENGTHS)] for i in range(requests)]
    return engine, lambda i: store, workload(engine, lengths, load, 7, store)


def slowdown(seconds: Sequence[float], engine: Engine, jobs: Sequence[Job]) -> float:
    """Mean of seconds ÷ a cold prompt's own prefill: lengths count alike, not by their seconds."""
    return mean_after([s / engine.whole(j.tokens) for s, j in zip(seconds, jobs, strict=True)], LEARN)


def mean_seconds(seconds: Sequence[float], engine: Engine, jobs: Sequence[Job]) -> float:
    return mean_after(seconds, LEARN)


METRICS = {"seconds": mean_seconds, "slowdown": slowdown}


def against_threshold(name: str, requests: int, metric: str = "seconds") -> list[Mixed]:
    """Auto and the fixed threshold that is best for the engine's middle store speed, at all five speeds."""
    speeds, score = grid.SPEEDS[name], METRICS[metric]
    engine, stores, jobs = mixed_jobs(name, speeds[len(speeds) // 2], requests)
    tuned = min(
        (256, *grid.LENGTHS, 10**9), key=lambda t: score(run(engine, stores, jobs, drive.threshold(t)), engine, jobs)
    )
    out = []
    for speed in speeds:
        engine, stores, jobs = mixed_jobs(name, speed, requests)
        fixed = score(run(engine, stores, jobs, drive.threshold(tuned)), engine, jobs)
        auto = score(drive.auto(engine, stores, jobs, grid.config(name))[0], engine, jobs)
        out.append(Mixed(metric, name, speed, auto, fixed, tuned))
    return out


def bench(report: Report, quick: bool) -> None:
    """`report.seed`: which arrivals and luck. Every cell in a process of its own."""
    report.server = "virtual clock"
    requests = 80 if quick else 120
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        todo = list(cells())
        outcomes = list(
            pool.map(
                measure,
                todo,
                [requests] * len(todo),
                [not quick] * len(todo),
                [report.seed] * len(todo),
                chunksize=6,
            )
        )
    for outcome in outcomes:
        for variant, seconds in outcome.seconds.items():
            report.add(str(outcome.cell), variant, seed_of(outcome.cell), seconds, "s")
    ratios = sorted(outcomes, key=lambda o: o.against_better)
    regrets = sorted(outcomes, key=lambda o: o.regret)
    report.note(
        f"auto / better of load and recompute: worst {ratios[-1].against_better:.3f} in {ratios[-1].cell}; above 1.05 in {sum(o.against_better > 1.05 for o in outcomes)} of {len(outcomes)} cells"
    )
    report.note(
        f"regret to the oracle: mean {sum(o.regret for o in outcomes) / len(outcomes):.4f}, worst {regrets[-1].regret:.3f} in {regrets[-1].cell}; above 0.05 in {sum(o.regret > 0.05 for o in outcomes)} cells"
    )
    report.note(
        f"exploring: {sum(o.probed_s for o in outcomes):.1f} s of background probes, {sum(o.explored_s for o in outcomes):.1f} s given away in requests"
    )
    for name in grid.ENGINES:
        for metric in METRICS:
            for m in against_threshold(name, 10 * requests // 4, metric):
                report.add(f"{name} {m.gb_per_s:g} GB/s mixed", "auto", 0, m.auto, metric)
                report.add(f"{name} {m.gb_per_s:g} GB/s mixed", f"threshold {m.tokens}", 0, m.threshold, metric)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="greedy oracle, 80 requests a cell")
    parser.add_argument(
        "--seed", type=int, default=0, help="other arrivals and luck: 0 to 3 are those the policy was tuned on"
    )
    parser.add_argument("--json", default="", help="file for the raw rows")
    args = parser.parse_args(argv)
    report = Report("simulate", seed=args.seed)
    bench(report, args.quick)
    print(report.table())
    if args.json:
        report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
