"""print the compiled plan, or what changes between two

    dynamo plan graphs/disagg.yaml
    dynamo plan --diff OLD NEW        graphs (*.yaml) or plans (*.json)

Plans are stable: the same graph and release give the same text. --diff exits 1 when the plans differ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError
from graphs.compile import compile_plan
from graphs.launch import runs
from graphs.load import read_graph
from graphs.plan import Plan
from graphs.plandiff import Change, diff
from graphs.site import Site

RUN = "<run>"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", nargs="?", help="graph file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--diff", nargs=2, metavar=("OLD", "NEW"), help="compare two graphs or plans")
    parser.add_argument("--state", type=Path, default=None)


def run(args: argparse.Namespace) -> int:
    state = (args.state or runs.default_state()).absolute()
    if args.diff:
        changes = diff(*(plan_of(p, state, args.set) for p in args.diff))
        print(json.dumps([c._asdict() for c in changes]) if args.json else _text(changes))
        return 1 if changes else 0
    if not args.graph:
        raise DynamoBlobError("CLI-ARGUMENT", "a graph file is needed", do="dynamo plan graphs/disagg.yaml")
    plan = plan_of(args.graph, state, args.set)
    print(json.dumps(plan.model_dump(mode="json"), indent=1) if args.json else as_text(plan))
    return 0


def plan_of(path: str, state: Path, sets: list[str]) -> Plan:
    """The plan of a graph file, or one that was written as JSON."""
    if path.endswith(".json"):
        return Plan.read(path)
    graph = read_graph(path, sets)
    from graphs.launch import store

    site = Site(run=state / "runs" / "plan", state=state)
    release = store.known_release(graph, site) if graph.spec.storage.embedded == "azurite" else None
    return compile_plan(graph, Site(run=site.run, state=state, release=release) if release else site)


def as_text(plan: Plan) -> str:
    """For people: one block a process."""
    release = plan.release
    lines = [
        f"graph {plan.graph} ({plan.source})",
        f"model {plan.served_model}: {release['model']} {release['version'] or release['channel']}  manifest {release['manifest_digest'][:16] or 'not published'}  trust {release['trust']}",
        f"endpoint {plan.endpoint}   discovery {plan.discovery}   events {plan.event_plane}   namespace {plan.namespace}",
    ]
    lines += [
        f"storage {s.role}: {s.url} container {s.container}{' (embedded)' if s.embedded else ''}" for s in plan.storage
    ]
    lines += [f"link {x.source} -> {x.to} ({x.kind})" for x in plan.links]
    for p in plan.processes:
        lines += ["", p.name, f"  argv     {' '.join(p.argv)}"]
        lines += [f"  port     {x.host}:{x.number} {x.name}: {x.purpose}" for x in p.ports] + [
            f"  socket   {x}" for x in p.sockets
        ]
        lines.append(
            f"  needs    {p.memory_bytes >> 20} MiB memory, {p.shm_bytes >> 20} MiB shared memory, {p.gpus} GPUs, {p.inotify} inotify instances"
        )
        lines.append(
            f"  identity {p.identity}   drain {p.drain_s:g} s   killed after {p.grace_s:g} s   restarts {p.restarts} in {p.restart_window_s:g} s"
        )
        lines += [f"  after    {', '.join(p.after)}"] if p.after else []
        lines += [f"  env      {k}={v}" for k, v in p.env.items()]
        lines += [f"  config   {k}={v}" for k, v in flat(p.config or {})]
    return "\n".join(lines)


def flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [x for k, v in value.items() for x in flat(v, f"{path}.{k}" if path else str(k))]
    return [(path, value)]


def _text(changes: list[Change]) -> str:
    return "\n".join(f"{c.path}\n  - {c.old}\n  + {c.new}" for c in changes) or "the plans are equal"
