"""start a graph on this machine and keep it running

    dynamo serve graphs/disagg.yaml [--set components.decode.replicas=2] [--dry-run]
    dynamo serve graphs/disagg.yaml --smoke "What is the capital of France?" --json smoke.json

One live table shows every process and why it is not ready. Ctrl-C drains, a second Ctrl-C kills.
--smoke starts, asks, proves every hop by the parts' own counters and stops. Exit 0 only if all held.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from components.common.errors import DynamoBlobError
from graphs import output
from graphs.launch import byhand, runs
from graphs.launch.session import Session
from graphs.launch.table import View, phase_table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", help="graph file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a value of the graph, e.g. components.decode.replicas=2",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print argv and environment of every process as a script; starts nothing, writes the credentials it reads",
    )
    parser.add_argument("--smoke", metavar="QUESTION", help="start, ask, prove every hop, stop")
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="with --smoke or --dry-run: write the result there (nothing or - = stdout); else the status once ready",
    )
    parser.add_argument("--state", type=Path, default=None, help="state directory (default .state of the checkout)")
    parser.add_argument("--quiet", action="store_true", help="no table")


def run(args: argparse.Namespace) -> int:
    state = (args.state or runs.default_state()).absolute()
    if args.json:
        writable(args.json)
    if args.dry_run:
        return dry_run(args, state)
    with View(args.quiet) as view:
        session = Session(args.graph, args.set, state, view)
        if args.smoke is not None:
            from graphs.smoke import smoke

            return int(smoke(session, args.smoke, args.json))

        asyncio.run(_serve(session, args.json))
    return 0


async def _serve(session: Session, json_file: str | None) -> None:
    async def announce() -> None:
        await session.planned.wait()
        assert session.supervisor is not None
        await session.supervisor.ready.wait()
        session.view.say("")
        session.view.console.print(phase_table(session.supervisor.phases)) if not session.view.quiet else None
        session.view.say(
            f"ready: {session.supervisor.plan.endpoint}/v1  model {session.graph.spec.served_model}  logs in {session.supervisor.run_dir}/logs"
        )
        if json_file:
            try:
                output.write(json_file, {**session.supervisor.snapshot(), "phases": session.supervisor.phases})
            except DynamoBlobError as e:  # the graph serves all the same
                session.view.say(str(e))

    task = asyncio.create_task(announce())
    try:
        await session.run()
    finally:
        task.cancel()


def writable(file: str) -> None:
    """Raises CLI-WRITE now rather than after minutes of work. Leaves no file where there was none."""
    if file == "-":
        return
    there = os.path.lexists(file)
    try:
        with open(file, "a"):
            pass
        if not there:
            os.unlink(file)
    except OSError as e:
        raise DynamoBlobError("CLI-WRITE", "the JSON file cannot be written", where=file, why=str(e.strerror)) from None


def dry_run(args: argparse.Namespace, state: Path) -> int:
    """Every process as it would run. Starts nothing; credentials that the commands read are written."""
    if args.json:
        output.write(args.json, byhand.prepared(args.graph, args.set, state)[1].model_dump(mode="json"))
    else:
        print(byhand.script(args, state))
    return 0
