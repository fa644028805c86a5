"""drain a running graph and end it; clean up after killed launchers

    dynamo stop            the graph that runs
    dynamo stop --all      every graph of this state directory, and what killed launchers left

Returns when nothing is left. --now kills instead of draining, also a launcher that hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from components.common.errors import DynamoBlobError
from graphs.cli._common import add_state, live
from graphs.launch import control, runs
from graphs.sockets import control_socket

DEADLINE_S, KILL_AFTER_S = 180.0, 10.0


def add(parser: argparse.ArgumentParser) -> None:
    add_state(parser)
    parser.add_argument("--all", action="store_true", help="every graph; no error when none runs")
    parser.add_argument("--now", action="store_true", help="kill, do not wait for answers in flight")


def run(args: argparse.Namespace) -> int:
    state: Path = (args.state or runs.default_state()).absolute()
    found = [r for r in runs.all_runs(state) if r.launcher_alive and not r.closed] if args.all else [live(args)]
    for one in found:
        for _ in range(2 if args.now else 1):
            _ask_to_stop(one, KILL_AFTER_S / 5 if args.now else KILL_AFTER_S)
    for one in found:
        _wait(one, args.now)
    swept = runs.sweep(state)
    if args.json:
        print(json.dumps({"stopped": [str(r.path) for r in found], "swept": swept}))
    else:
        for one in found:
            print(f"stopped {one.path.name}")
        for line in swept:
            print(f"cleaned up {line}")
    return 0


def _ask_to_stop(one: runs.Run, timeout_s: float) -> None:
    """By its control socket, or by signal when it is too young to have one."""
    try:
        control.ask(control_socket(one.path), {"op": "stop"}, timeout_s)
    except DynamoBlobError as e:
        if e.code != "CONTROL-UNREACHABLE":
            raise
        with suppress(ProcessLookupError):
            os.kill(one.state["launcher"]["pid"], signal.SIGTERM)


def _wait(one: runs.Run, now: bool = False) -> None:
    """Until the launcher has ended. With `now` it is killed when it does not; the sweep then ends what it ran."""
    end = time.monotonic() + (KILL_AFTER_S if now else DEADLINE_S)
    while one.launcher_alive and time.monotonic() < end:
        time.sleep(0.1)
    if now and one.launcher_alive:
        with suppress(ProcessLookupError):
            os.kill(one.state["launcher"]["pid"], signal.SIGKILL)
        end = time.monotonic() + KILL_AFTER_S
        while one.launcher_alive and time.monotonic() < end:
            time.sleep(0.05)
    if one.launcher_alive:
        raise DynamoBlobError(
            "LAUNCH-STOP-LATE", "the launcher still drains", where=str(one.path), why=f"not ended after {DEADLINE_S:g} s",
            do="dynamo stop --now",
        )  # fmt: skip
