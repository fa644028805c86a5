"""what runs, in which state, and why not ready

    dynamo status [--watch]

Exit 0 when every process is ready, 1 when one is not, or nothing runs.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from graphs.cli._common import add_state, live
from graphs.launch import control
from graphs.launch.table import render
from graphs.sockets import control_socket


def add(parser: argparse.ArgumentParser) -> None:
    add_state(parser)
    parser.add_argument("--watch", action="store_true", help="keep the table up to date until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    socket = control_socket(live(args).path)
    snapshot = control.ask(socket, {"op": "status"})
    if args.json:
        print(json.dumps(snapshot, indent=1))
    elif args.watch:
        with Live(render(snapshot), console=Console(), auto_refresh=False) as shown:
            while True:
                time.sleep(1.0)
                shown.update(render(control.ask(socket, {"op": "status"})), refresh=True)
    else:
        Console().print(render(snapshot))
    return 0 if all_ready(snapshot) else 1


def all_ready(snapshot: dict[str, Any]) -> bool:
    return snapshot["phase"] == "serving" and all(p["state"] == "ready" for p in snapshot["processes"])
