"""Runs every rule over a graph file. Findings come in the order of the file."""

from __future__ import annotations

import re
from pathlib import Path

from components.common.errors import DynamoBlobError
from graphs.check import engine, links, machine, storage, tiers
from graphs.check.base import Context, Rule
from graphs.compile import compile_plan
from graphs.load import Finding, Graph, examine
from graphs.pools import workers_of
from graphs.site import Site

RULES: tuple[Rule, ...] = (*links.RULES, *engine.RULES, *tiers.RULES, *storage.RULES, *machine.RULES)
NOWHERE = Path("/nonexistent/dynamo-blob")


def check_graph(path: Path | str, sets: list[str] | tuple[str, ...] = ()) -> list[Finding]:
    """Everything `check` knows about a graph file without asking anybody. Never raises for a bad file."""
    try:
        graph, findings = examine(path, sets)
    except DynamoBlobError as e:
        return [of(e)]
    return in_order(findings if graph is None else [*findings, *check_loaded(graph)])


def check_loaded(graph: Graph) -> list[Finding]:
    try:
        workers = tuple(workers_of(graph))
        plan = compile_plan(graph, Site(run=NOWHERE / "runs" / "check", state=NOWHERE))
    except DynamoBlobError as e:  # a profile or engine setting that cannot be merged: nothing else can be judged
        return [of(e)]
    context = Context(graph, workers, plan)
    return in_order([f for rule in RULES for f in rule(context)])


def of(error: DynamoBlobError) -> Finding:
    return Finding(error.code, error.what, error.where, error.why, error.do)


def in_order(findings: list[Finding]) -> list[Finding]:
    """Errors and warnings as they stand in the file."""

    def key(f: Finding) -> tuple[int, int, str]:
        found = re.search(r":(\d+):(\d+)$", f.where)
        return (int(found[1]), int(found[2]), f.code) if found else (1 << 30, 0, f.code)

    return sorted(dict.fromkeys(findings), key=key)
