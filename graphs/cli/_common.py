"""Arguments several verbs share."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphs.launch import runs


def add_state(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", type=Path, default=None, help="state directory (default .state of the checkout)")
    parser.add_argument("--graph", default="", help="name of the graph, when several run")


def live(args: argparse.Namespace) -> runs.Run:
    """The run these arguments mean. Raises LAUNCH-NOT-RUNNING."""
    return runs.live_run((args.state or runs.default_state()).absolute(), args.graph)
