"""`bench overlap`: the front computed while the back loads, against loading all and computing all, on the real engine.

    python -m bench.overlap [--model smollm2-135m-instruct] [--lengths 2048,4096] [--rounds N] [--json FILE]

For each length the store is made as fast as makes loading take as long as computing; then rounds of `load`, `recompute`,
`overlap` (forced) and `auto` (the cost model plans, or declines), interleaved, one request at a time, HBM and DRAM emptied
before each. Ideal = c·l / (c + l) of the round's own c and l; gain = (better way - overlap) / (better way - ideal). Where
`auto` declines, it is also divided by the way that it took: what declining costs, whichever way was better.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.crossover import Bed, bed, serve, store_all
from bench.report import Report
from tests.kvtools.text import ids

VARIANTS = ("load", "recompute", "overlap", "auto")
COUNTED = ("overlapped", "overlaps_planned")
STEP = 256
SHORT = 512
"""Tokens of the prompts by which `auto` learns both speeds before the rounds."""
LEARN = 8


def overlapped(b: Bed) -> tuple[float, float]:
    """Requests that were taken back so far, and those planned so; statistics come with a step."""
    time.sleep(0.3)
    serve(b, ids(20, seed=time.monotonic_ns()), "recompute")
    taken, planned = (sum(b.engine.metrics(f"vllm:dynamo_blob_kv_cost_{what}").values()) for what in COUNTED)
    return taken, planned


def level(b: Bed, prompt: list[int], nbytes: int) -> float:
    """Bytes per second at which loading takes as long as computing; set, and found by two corrections."""
    compute = serve(b, prompt, "recompute")["ttft"]
    rate = nbytes / compute
    for _ in range(2):
        b.speed(rate)
        rate *= serve(b, prompt, "load")["ttft"] / compute
    b.speed(rate)
    return rate


def run(report: Report, model: str, lengths: Sequence[int], rounds: int) -> None:
    """At each of `lengths` (tokens) the store is levelled with the engine, then measured."""
    report.server, rng = "azurite behind the fault proxy", random.Random(0)
    more = {"overlap": True, "overlap_step_tokens": STEP}
    with (
        tempfile.TemporaryDirectory() as work,
        bed(Path(work), model, max(lengths) + 128, step_tokens=STEP, **more) as b,
    ):
        prompts = {n: ids(n, seed=n) for n in (SHORT, *lengths)}
        store_all(b, prompts)
        short = prompts.pop(SHORT)
        for n, prompt in prompts.items():
            rate = level(b, prompt, n * 46_080)
            for _ in range(LEARN):
                serve(b, short, "auto")
            gains, ratios, declined, costs, planned = [], [], [], [], []
            for round_ in range(rounds):
                took: dict[str, float] = {}
                for variant in rng.sample(VARIANTS, len(VARIANTS)):
                    before = overlapped(b)
                    answer = serve(b, prompt, variant)
                    took[variant] = answer["ttft"]
                    report.add(f"{n}", variant, round_, took[variant], "s")
                    jumped, meant = (after - old for after, old in zip(overlapped(b), before, strict=True))
                    report.add(f"{n} taken back", variant, round_, jumped, "requests")
                    report.add(f"{n} planned", variant, round_, meant, "requests")
                    report.add(f"{n} loaded", variant, round_, answer["cached"], "tokens")
                    if variant == "auto":
                        planned.append(meant > 0)
                    if variant == "auto" and not meant:
                        declined.append("load" if answer["cached"] else "recompute")
                compute, load = took["recompute"], took["load"]
                better = min(compute, load)
                gains.append((better - took["overlap"]) / (better - compute * load / (compute + load)))
                ratios.append(took["auto"] / better)
                if len(declined) > len(costs):
                    costs.append(took["auto"] / took[declined[-1]])
            wins = [round(ratio, 2) for ratio, meant in zip(ratios, planned, strict=True) if meant]
            report.note(
                f"{n} tokens, {rate / 1e6:.1f} MB/s: share of the ideal gain {json.dumps([round(g, 2) for g in gains])}, median "
                f"{median(gains):.2f} (goal 0.6 from 4096); auto / better way, median {median(ratios):.2f}, worst {max(ratios):.2f}; "
                f"planned, auto / better way {json.dumps(wins)} (goal: at most 1.05); declined {declined}, auto / the way it took {json.dumps([round(c, 2) for c in costs])}"
            )


def bench(report: Report, quick: bool) -> None:
    run(report, "smollm2-135m-instruct", (2048,) if quick else (2048, 4096), 2 if quick else 4)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="directory under .state/models")
    parser.add_argument("--lengths", default="2048,4096", help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", default="")
    args = parser.parse_args(argv)
    lengths = [int(n) for n in args.lengths.split(",")]
    report = Report("overlap")
    run(report, args.model, lengths, args.rounds)
    print(report.table())
    if args.json:
        report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
