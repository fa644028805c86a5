"""Run a benchmark by name and write its raw samples.

dynamo bench                      the benchmarks there are
dynamo bench NAME [--quick] --json FILE
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

from components.common.errors import DynamoBlobError, nearest

_ROOT = Path(__file__).resolve().parents[2]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="which one; without it they are listed")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: minutes instead of an hour")
    parser.add_argument("--json", metavar="FILE", default="", help="where the samples go")


def run(args: argparse.Namespace) -> int:
    known = benchmarks()
    if not args.name:
        print("\n".join(f"{name:<16} {text}" for name, text in known.items()))
        return 0
    if args.name not in known:
        raise DynamoBlobError("BENCH-UNKNOWN", f"there is no benchmark '{args.name}'", do=nearest(args.name, known))
    sys.path.insert(0, str(_ROOT))
    from bench.report import Report

    report = Report(args.name)
    module = importlib.import_module("bench." + args.name.replace("-", "_"))
    try:
        module.bench(report, args.quick)
    finally:  # samples of a run that broke off are worth keeping
        if args.json:
            report.write(args.json)
        print(report.table())
    return 0


def benchmarks() -> dict[str, str]:
    """Name and first docstring line of each module in bench/ that defines `bench`, read without importing it."""
    found = {}
    for path in sorted((_ROOT / "bench").glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(n, ast.FunctionDef) and n.name == "bench" for n in tree.body):
            found[path.stem.replace("_", "-")] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found
