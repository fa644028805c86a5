"""change the number of replicas while the graph serves

    dynamo scale prefill=2

New processes start and become ready by themselves; processes that go are drained first.
"""

from __future__ import annotations

import argparse
import json

from components.common.errors import DynamoBlobError
from graphs.cli._common import add_state, live
from graphs.launch import control
from graphs.sockets import control_socket


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", help="component=replicas, e.g. prefill=2")
    add_state(parser)


def run(args: argparse.Namespace) -> int:
    component, eq, number = args.what.partition("=")
    if not eq or not component or not number.isdecimal():
        raise DynamoBlobError("CLI-ARGUMENT", f"'{args.what}' is not component=replicas", do="dynamo scale prefill=2")
    done = control.ask(
        control_socket(live(args).path),
        {"op": "scale", "component": component, "replicas": int(number)},
        timeout_s=300.0,
    )
    print(
        json.dumps(done)
        if args.json
        else f"started {', '.join(done['started']) or 'nothing'}; drained {', '.join(done['drained']) or 'nothing'}"
    )
    return 0
