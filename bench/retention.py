"""Seconds saved per GB-hour of Blob: our retention against LRU, TTL only and an oracle, on a replayed trace.

The Mooncake conversation trace (12,031 requests of one hour) with two classes, three ways:

  chat          one class, one model: nothing to tell objects apart but their history
  chat+bulk     the trace, and as many one-shot prompts of the same lengths that nobody repeats (batch work)
  8b+32b        each conversation is of an 8B or of a 32B model (bytes and seconds from facts of one H200)

Every policy has the same byte budget (a share of everything ever put) and sweeps every 30 s of virtual time, so seconds
saved per provisioned GB-hour compares them; per GB-hour held is given beside it. `ttl` forgets after 300 s.
`bound / lru` says what any policy whatever could gain in the cell (the dual of the offline problem): where it is below 1.2,
1.2x LRU is out of reach; the oracle reaches it within a few percent, so it is an oracle.
The trace is not part of the repository: BENCH_TRACE names it; without it a synthetic one of the same kind is used.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from bench.report import Report
from components.common.kv.replay import POLICIES, Request, Shape, bound, chunk_name, footprint, read_trace, replay

_8B = Shape(512 * 147_456, 512 * 27e-6 - 512 * 147_456 / 10e9)
_32B = Shape(512 * 262_144, 512 * 115e-6 - 512 * 262_144 / 10e9)
Trace = Sequence[tuple[float, list[int]]]


def bench(report: Report, quick: bool) -> None:
    path = os.environ.get("BENCH_TRACE", "")
    trace = read_trace(path) if path else synthetic(2000 if quick else 12000)
    if quick:
        trace = trace[:4000]
    report.note(
        f"trace: {Path(path).name if path else 'synthetic'}, {len(trace)} requests; store 10 GB/s; virtual clock, sweeps every 30 s"
    )
    for mix, (requests, shapes) in mixes(trace).items():
        everything = footprint(requests, shapes)
        for share in (0.06, 0.25) if quick else (0.03, 0.06, 0.12, 0.25):
            cell, found = f"{mix} {share:.0%} of {everything / 1e12:.1f} TB", {}
            for name, make in POLICIES.items():
                result = replay(
                    requests, shapes, make(requests), everything * share, ttl_s=300 if name == "ttl" else 86400
                )
                found[name] = result
                report.add(cell, name, 0, result.per_provisioned, "s per provisioned GB-hour")
                report.add(cell, name, 0, result.per_held, "s per held GB-hour")
                report.add(
                    cell,
                    name,
                    0,
                    result.puts / max(1, len({c for r in requests for c in r.chunks})),
                    "puts per distinct chunk",
                )
            report.add(cell, "worth / lru", 0, found["worth"].seconds_saved / found["lru"].seconds_saved, "ratio")
            report.add(cell, "worth / oracle", 0, found["worth"].seconds_saved / found["oracle"].seconds_saved, "ratio")
            most = bound(requests, shapes, everything * share)
            report.add(cell, "oracle / lru", 0, found["oracle"].seconds_saved / found["lru"].seconds_saved, "ratio")
            report.add(cell, "bound / lru: the most any policy can get", 0, most / found["lru"].seconds_saved, "ratio")


def mixes(trace: Trace) -> dict[str, tuple[list[Request], dict[str, Shape]]]:
    """The trace as one class, with a class of one-shot prompts, and split over two models."""
    names: dict[tuple[str, int], str] = {}

    def chunks(cls: str, ids: list[int]) -> tuple[str, ...]:
        return tuple(names.setdefault((cls, i), chunk_name(cls, i)) for i in ids)

    rng = random.Random(1)
    chat = [Request(at, "chat", chunks("chat", ids)) for at, ids in trace]
    bulk, fresh = [], 10**9
    for at, _ in trace:
        n = max(1, len(rng.choice(trace)[1]))
        bulk.append(Request(at, "bulk", chunks("bulk", [0, *range(fresh, fresh + n - 1)])))
        fresh += n
    model: dict[int, str] = {}
    split = []
    for at, ids in trace:
        if len(ids) > 1:
            cls = model.setdefault(ids[1], rng.choice(("8b", "32b")))
            split.append(Request(at, cls, chunks(cls, ids)))
    return {
        "chat": (chat, {"chat": _8B}),
        "chat+bulk": (sorted(chat + bulk, key=lambda r: r.at), {"chat": _8B, "bulk": _8B}),
        "8b+32b": (split, {"8b": _8B, "32b": _32B}),
    }


def synthetic(requests: int, seed: int = 0) -> list[tuple[float, list[int]]]:
    """Conversations of 1 to 8 turns, 30 to 300 s apart, over one system prompt: the kind of the trace, not its numbers."""
    rng, out, fresh, at = random.Random(seed), [], 1, 0.0
    while len(out) < requests:
        at += rng.expovariate(2.0)
        ids, when = [0], at
        while True:
            n = max(1, int(rng.lognormvariate(2.3, 0.8)))
            ids = [*ids, *range(fresh, fresh + n)]
            fresh += n
            out.append((when, ids))
            if rng.random() > 0.4:
                break
            when += rng.uniform(30, 300)
    return sorted(out, key=lambda r: r[0])[:requests]
