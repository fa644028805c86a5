"""find what would fail or answer wrongly, before anything starts

    dynamo check graphs/*.yaml           the graphs alone
    dynamo check --live graph.yaml       also storage, rights, endpoints and planes, as they are now

Each finding: code, file:line, why, and the fix. Exit 1 when there is an error (with --strict also for warnings).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from graphs.check import check_graph
from graphs.load import Finding


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", nargs="+", help="graph files")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--strict", action="store_true", help="warnings fail too")
    parser.add_argument("--live", action="store_true", help="ask the storage accounts and planes too")
    parser.add_argument("--state", type=Path, default=None, help="state directory of the running graph, for --live")


def run(args: argparse.Namespace) -> int:
    findings: list[Finding] = []
    for path in args.graph:
        own = check_graph(path, args.set)
        if args.live and not any(f.severity == "error" for f in own):
            from graphs.check.live import check_live

            own += check_live(path, args.set, args.state)
        findings += own
    warnings = [f for f in findings if f.severity == "warning"]
    errors = [f for f in findings if f.severity == "error"]
    if args.json:
        print(json.dumps({"findings": [f.as_json() for f in findings], "errors": len(errors)}, indent=1))
    else:
        for f in findings:
            print(f"{'' if f.severity == 'error' else f.severity + ' '}{f.as_error()}\n")
        print(f"{_count(args.graph, 'graph')}: {_count(errors, 'error')}, {_count(warnings, 'warning')}")
    return 1 if errors or (args.strict and warnings) else 0


def _count(items: Sequence[object], name: str) -> str:
    return f"{len(items)} {name}{'' if len(items) == 1 else 's'}"
