"""One cell of `bench weights` by hand: chosen variants, size and rounds, and what each load waited for.

    python -m bench.weights_cell [--only blob_cold,ceiling_recv,...] [--rounds 3] [--gb 4] [--shards 8] [--in-flight N]
        [--torch-threads N] [--link BYTES_PER_S] [--tls] [--trace FILE] [--json FILE]

--in-flight      ranges in flight of every variant and ceiling (weights.range_in_flight)
--torch-threads  threads with which tensors are copied into parameters, in variants and ceilings alike
--tls            the stand-in over TLS, with a CA of our own: the one way in which `runai` runs (pip: runai-model-streamer[azure])
--trace          a timeline of the last round's loads for chrome://tracing or ui.perfetto.dev: who did what when

Rows "thread seconds": all threads of one load together, by what they did or waited for (components.common.loading.report.SPENT).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ONLY = (
    "ceiling_recv", "ceiling_verified_recv", "ceiling_memcpy", "blob_cold", "node_cache", "service_cold", "peer", "ceiling_nixl"
)  # fmt: skip


def main() -> int:
    from bench import weights
    from bench.report import Report
    from tests.faults.releases import make_release, weights_config
    from tests.tls import write_certificate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ONLY))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=0)
    parser.add_argument("--torch-threads", type=int, default=weights.engine_threads())
    parser.add_argument("--link", type=float, default=0.0)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--trace", default="")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    report = Report("weights", server="stand-in")
    work = Path(tempfile.mkdtemp(prefix="db-weights-", dir="/dev/shm"))
    began = time.monotonic()
    try:
        weights.generate(work / "model", int(args.gb * 1e9), args.shards)
        manifest = make_release(work / "store", work / "model", model="bench")
        shutil.rmtree(work / "model")
        print(f"{time.monotonic() - began:.0f} s: the model is there", flush=True)
        changes: dict[str, Any] = {"range_in_flight": args.in_flight} if args.in_flight else {}
        tls, account = None, None
        if args.tls:
            tls = write_certificate(work, "standin.localhost")
        with weights.stand_in(work / "store", args.link, tls) as (url, served):
            if tls:
                account = weights_config(url, work / "w").account.model_copy(update={"ca_bundle": str(tls[0])})
            weights.cell(
                report, f"{args.gb:g} GB of {args.shards} shards, stand-in{' over TLS' if tls else ''}", work, url, served, manifest, account,
                only=tuple(args.only.split(",")), rounds=args.rounds, threads=args.torch_threads, trace=args.trace, changes=changes,
            )  # fmt: skip
        weights.verdict(report)
        report.note(f"torch threads {args.torch_threads}, ranges in flight {args.in_flight or 'default'}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if args.json:
            report.write(args.json)
        print(report.table())
        print(f"{time.monotonic() - began:.0f} s in all")
    return 0


def events(loads: dict[str, list[tuple[str, str, float, float]]]) -> str:
    """Timelines by load as one chrome trace; each begins at its own 0."""
    out: list[dict[str, Any]] = []
    for pid, (load, line) in enumerate(loads.items()):
        out.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": load}})
        first = min((began for _, _, began, _ in line), default=0.0)
        for tid, name in enumerate(dict.fromkeys(x[0] for x in line)):
            out.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}})
            for _, what, began, ended in (x for x in line if x[0] == name):
                out.append({
                    "ph": "X", "pid": pid, "tid": tid, "name": what, "ts": (began - first) * 1e6, "dur": (ended - began) * 1e6
                })  # fmt: skip
    return json.dumps(out)


if __name__ == "__main__":
    sys.exit(main())
