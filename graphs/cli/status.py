"""what runs, in which state, and why not ready; which release is served, by its digest, approver and age

    dynamo status [--watch]

Exit 0 when every process is ready, 1 when one is not, or nothing runs.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from components.common.errors import DynamoBlobError
from components.common.loading.client import ServiceClient, ServiceGone
from graphs.cli._common import add_state, live
from graphs.launch import control
from graphs.launch.table import render
from graphs.plan import Plan
from graphs.sockets import control_socket

ANSWER_S = 2.0  # to wait for a weight service


def add(parser: argparse.ArgumentParser) -> None:
    add_state(parser)
    parser.add_argument("--watch", action="store_true", help="keep the table up to date until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    socket = control_socket(live(args).path)

    def look() -> dict[str, Any]:
        now = control.ask(socket, {"op": "status"})
        return now | {"served": served(Path(now["run_dir"]) / "plan.json")}

    snapshot = look()
    if args.json:
        print(json.dumps(snapshot, indent=1))
    elif args.watch:
        with Live(render(snapshot), console=Console(), auto_refresh=False) as shown:
            while True:
                time.sleep(1.0)
                shown.update(render(look()), refresh=True)
    else:
        Console().print(render(snapshot))
    return 0 if all_ready(snapshot) else 1


def served(plan: Path) -> dict[str, Any] | None:
    """What a weight service of the graph says it resolved at start and pinned (`Release`, its age as of now); None when none can say."""
    for process in Plan.read(plan).processes if plan.is_file() else ():
        if process.component == "weights":
            try:
                release = ServiceClient(str((process.config or {})["listen"]), ANSWER_S).release()
            except (ServiceGone, DynamoBlobError, KeyError, ValueError):
                continue  # why it is not ready stands in its row
            age = time.time() - datetime.fromisoformat(release.approved_at).timestamp() if release.approved_at else 0.0
            return release.model_dump(mode="json") | {"age_s": round(age, 1)}
    return None


def all_ready(snapshot: dict[str, Any]) -> bool:
    return snapshot["phase"] == "serving" and all(p["state"] == "ready" for p in snapshot["processes"])
