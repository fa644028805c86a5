"""Telling who listens that something changed. A failure is a warning: what was done is done, and is noticed a little later."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from components.common.errors import DynamoBlobError
from components.common.messages.announce import Announcement, publish
from graphs.launch import runs
from graphs.plan import Plan


def add_announce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--announce", default="", metavar="URL", help="nats://host:port to announce it at (default: that of --plan, or of the graphs that run here)"
    )  # fmt: skip


def tell(args: argparse.Namespace, item: Announcement, later: str) -> None:
    """Announce to everybody who should hear it. `later`: when they notice without having been told."""
    try:
        found = urls(args)
    except DynamoBlobError as e:  # a plan that cannot be read: what was done is done all the same
        print(f"warning: ANNOUNCE-FAILED: nobody was told: {e.code}: {e.where}; {later}", file=sys.stderr)
        return
    for url in found:
        why = publish(url, item)
        if why:
            print(f"warning: ANNOUNCE-FAILED: nobody was told: {why}; {later}", file=sys.stderr)


def urls(args: argparse.Namespace) -> list[str]:
    """--announce, else what the plans of the graphs concerned name."""
    if args.announce:
        return [args.announce]
    plan: Path | None = getattr(args, "plan", None)
    state = (args.state or runs.default_state()).absolute()
    live = [r.path / "plan.json" for r in runs.all_runs(state) if r.launcher_alive and not r.closed]
    paths = [plan] if plan else [p for p in live if p.is_file()]
    found = [str((p.config or {}).get("announce", "")) for path in paths for p in Plan.read(path).processes]
    return sorted({u for u in found if u})
