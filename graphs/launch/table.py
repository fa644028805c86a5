"""The one status table: component, state, why not ready, ports, progress. Live on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

COLOUR = {
    "ready": "green", "starting": "yellow", "waiting": "dim", "unready": "red", "backing-off": "red", "draining": "yellow", "stopped": "dim", "failed": "bold red",
}  # fmt: skip


def table(snapshot: dict[str, Any]) -> Table:
    out = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("component", "state", "ready after", "pid", "ports", "restarts", "why / progress"):
        out.add_column(column, overflow="fold", no_wrap=column in ("component", "state"))
    for row in snapshot["processes"]:
        ready = f"{row['ready_after_s']:.1f} s" if row["ready_after_s"] is not None else ""
        ports = " ".join(str(p) for p in row["ports"].values())
        words = " ".join(x for x in (row.get("progress", ""), row["why"]) if x)
        out.add_row(
            row["name"],
            Text(row["state"], COLOUR.get(row["state"], "")),
            ready,
            str(row["pid"] or ""),
            ports,
            str(row["restarts"] or ""),
            Text(words),  # as it is: a log line may look like markup
        )
    return out


def headline(snapshot: dict[str, Any]) -> Text:
    release = snapshot["release"]
    line = f"{snapshot['graph']}  {snapshot['phase']}  {snapshot['elapsed_s']:.0f} s  model {snapshot['model']} {release.get('version') or ''}"
    if snapshot["engine"] == "mock":
        line += "  [fake engine: no model runs here]"
    if release.get("trust") == "none":
        line += "  [unsigned: digests alone prove the bytes]"
    if release.get("loader"):
        line += f"  [UNVERIFIED loader {release['loader']}: what the engine reads is not checked against the manifest]"
    if snapshot.get("note"):
        line += f"  [{snapshot['note']}]"
    if snapshot["phase"] == "serving":
        line += f"  {snapshot['endpoint']}"
    return Text(line, "bold")


def release_line(served: dict[str, Any], channel: str) -> Text:
    """Which release is served, and who answers for it."""
    # The launcher resolves a channel once and pins the version: the service then knows the version only.
    origin = f"channel:{channel}" if channel and served["resolved_from"] == "version" else served["resolved_from"]
    line = f"release {served['model']} {served['version']} (from {origin})  manifest {served['manifest_digest'][:16]}…"
    if served["approver"]:
        days, rest = divmod(int(served["age_s"]), 86400)
        age = (
            f"{days} d {rest // 3600} h"
            if days
            else f"{rest // 3600} h {rest % 3600 // 60} min"
            if rest >= 3600
            else f"{rest // 60} min {rest % 60} s"
        )
        return Text(f"{line}  approved by {served['approver'][:16]}… {age} ago ({served['approved_at']})")
    return Text(f"{line}  [approved by nobody]")


def render(snapshot: dict[str, Any]) -> Group:
    served = (
        [release_line(snapshot["served"], snapshot["release"].get("channel") or "")] if snapshot.get("served") else []
    )
    return Group(headline(snapshot), *served, table(snapshot))


class View:
    """Shows snapshots: a live table on a terminal, else one line per change of a state."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(file=sys.stderr)
        self.quiet = quiet
        self._said: dict[str, str] = {}
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal and not quiet else None

    def __enter__(self) -> View:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live:
            self._live.__exit__(*exc)

    def show(self, snapshot: dict[str, Any]) -> None:
        if self._live:
            self._live.update(render(snapshot), refresh=True)
        elif not self.quiet:
            for row in snapshot["processes"]:
                if self._said.get(row["name"]) != row["state"]:
                    self._said[row["name"]] = row["state"]
                    words = (
                        f"  {row['why']}"
                        if row["why"] and row["state"] in ("backing-off", "failed", "unready", "waiting")
                        else ""
                    )
                    self.console.print(
                        f"{snapshot['elapsed_s']:6.1f} s  {row['name']:<18} {row['state']}{words}",
                        highlight=False,
                        soft_wrap=True,
                        markup=False,
                    )

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def phase_table(phases: list[dict[str, Any]]) -> Table:
    """Where the start's time went."""
    out = Table(box=None, pad_edge=False, header_style="bold", title="start", title_justify="left")
    for column in ("phase", "from", "to", "seconds"):
        out.add_column(column, justify="left" if column == "phase" else "right")
    for p in sorted(phases, key=lambda x: (x["start_s"], x["end_s"])):
        out.add_row(p["name"], f"{p['start_s']:.1f}", f"{p['end_s']:.1f}", f"{p['end_s'] - p['start_s']:.1f}")
    return out
