"""what a byte budget in Blob would earn on your traffic

    dynamo replay trace.jsonl --budget 64GiB
    dynamo replay trace.jsonl --budget 64GiB --chunk-bytes 75497472 --seconds-per-chunk 0.0063 --policies worth,lru,oracle

Replays a trace (JSON lines: timestamp in ms, input_length, hash_ids) on a virtual clock through the real catalogue and
retention policies. `oracle` knows the future; no policy can. Seconds saved are recompute minus load.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from components.common.errors import DynamoBlobError, nearest
from components.common.kv.replay import POLICIES, Request, Shape, chunk_name, footprint, read_trace, replay
from components.common.messages.tenants import Size


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="JSON lines")
    parser.add_argument("--budget", required=True, help="bytes in Blob, e.g. 64GiB")
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"any of {', '.join(POLICIES)}")
    parser.add_argument("--block-tokens", type=int, default=512, help="tokens of one hash id of the trace")
    parser.add_argument(
        "--chunk-bytes", default="75497472", help="bytes of one such block (default: 512 tokens of an 8B model)"
    )
    parser.add_argument(
        "--seconds-per-chunk",
        type=float,
        default=0.0063,
        help="recompute minus load, of one block (default: 8B, H200, 10 GB/s)",
    )
    parser.add_argument("--ttl", type=float, default=86400.0, help="seconds after the put or last hit")
    parser.add_argument("--sweep", type=float, default=30.0, help="seconds between sweeps")


def run(args: argparse.Namespace) -> int:
    names = args.policies.split(",")
    for name in names:
        if name not in POLICIES:
            raise DynamoBlobError("CLI-ARGUMENT", f"there is no policy '{name}'", why=nearest(name, POLICIES))
    trace = read_trace(args.trace, args.block_tokens)
    if len(trace) < 2 or trace[-1][0] <= trace[0][0]:
        raise DynamoBlobError(
            "REPLAY-TRACE", "the trace spans no time", where=str(args.trace), do="give two requests at different times"
        )
    shapes = {"trace": Shape(size(args.chunk_bytes), args.seconds_per_chunk)}
    named: dict[int, str] = {}
    requests = [
        Request(at, "trace", tuple(named.setdefault(i, chunk_name("trace", i)) for i in ids)) for at, ids in trace
    ]
    budget = size(args.budget)
    results = [
        replay(requests, shapes, POLICIES[n](requests), budget, ttl_s=args.ttl, sweep_s=args.sweep) for n in names
    ]
    if args.json:
        print(
            json.dumps([{**r._asdict(), "per_provisioned": r.per_provisioned, "per_held": r.per_held} for r in results])
        )
        return 0
    print(
        f"{len(requests)} requests, {results[0].chunks} chunks; everything would take {footprint(requests, shapes) / 1e9:.0f} GB, the budget is {budget / 1e9:.0f} GB"
    )
    print(f"{'policy':<8} {'hits':>8} {'of chunks':>9} {'s saved':>9} {'per GB-hour':>12} {'puts':>8} {'deleted':>8}")
    for r in results:
        print(f"{r.policy:<8} {r.hits:>8} {r.hits / r.chunks:>9.1%} {r.seconds_saved:>9.0f} {r.per_provisioned:>12.3f} {r.puts:>8} {r.deleted_ttl + r.deleted_budget:>8}")  # fmt: skip
    return 0


def size(text: str) -> int:
    try:
        return TypeAdapter(Size).validate_python(int(text) if text.isdigit() else text)
    except ValidationError:
        raise DynamoBlobError("CLI-ARGUMENT", f"'{text}' is no size", do="write bytes, or 64GiB") from None
