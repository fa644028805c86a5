"""logs of the running graph, or of the last one

    dynamo logs [PROCESS ...] [--follow] [--lines 50]

PROCESS is a name (prefill-0) or a component (prefill). Without it, every process.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from components.common.errors import DynamoBlobError, nearest
from graphs.cli._common import add_state
from graphs.launch import runs
from graphs.launch.child import tail


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("process", nargs="*", help="process or component")
    parser.add_argument("--lines", type=int, default=50, help="last lines of each")
    parser.add_argument("--follow", "-f", action="store_true", help="go on printing until Ctrl-C")
    add_state(parser)


def run(args: argparse.Namespace) -> int:
    if args.lines < 0:
        raise DynamoBlobError(
            "CLI-ARGUMENT", f"--lines {args.lines} is not a number of lines", do="dynamo logs --lines 50"
        )
    chosen = _chosen((args.state or runs.default_state()).absolute(), args.graph, args.process)
    width = max(len(p.stem) for p in chosen)
    if args.json:
        print(json.dumps({p.stem: _last(p, args.lines) for p in chosen}))
        return 0
    at = {p: _size(p) for p in chosen}
    for path in chosen:
        for line in _last(path, args.lines):
            print(f"{path.stem:<{width}}  {line}")
    while args.follow:
        time.sleep(0.2)
        for path in chosen:
            size = _size(path)
            if size > at[path]:
                with open(path, "rb") as f:
                    f.seek(at[path])
                    for line in f.read(size - at[path]).decode(errors="replace").splitlines():
                        print(f"{path.stem:<{width}}  {line}", flush=True)
            at[path] = size
    return 0


def _last(path: Path, lines: int) -> list[str]:
    return tail(path, 1 << 20)[-lines:] if lines else []


def _size(path: Path) -> int:
    """0 when an old run's directory was cleared away meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _chosen(state: Path, graph: str, names: list[str]) -> list[Path]:
    found = [
        r
        for r in runs.all_runs(state)
        if any((r.path / "logs").glob("*.log")) and (not graph or r.state.get("graph") == graph)
    ]
    found.sort(key=lambda r: not r.launcher_alive)  # one that runs goes before newer ones that ended
    if not found:
        raise DynamoBlobError(
            "LAUNCH-NO-RUN",
            "there is no run with logs",
            where=str(state / "runs"),
            do="dynamo serve graphs/disagg.yaml",
        )
    logs = sorted((found[0].path / "logs").glob("*.log"))
    out = [p for p in logs if not names or p.stem in names or p.stem.rpartition("-")[0] in names]
    for name in names:
        if not any(name in (p.stem, p.stem.rpartition("-")[0]) for p in logs):
            raise DynamoBlobError(
                "LAUNCH-NO-LOG",
                f"no process '{name}'",
                where=str(found[0].path),
                why=nearest(name, [p.stem for p in logs]),
                do="name a process or a component; `dynamo logs` alone shows all",
            )
    return out
