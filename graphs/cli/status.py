"""what runs, in which state, and why not ready; which release is served; what the KV tiers hit, and why not

    dynamo status [--watch]
    dynamo status --explain      what each worker believes of its tiers, what it predicted, what came of it, what choosing cost

Exit 0 when every process is ready, 1 when one is not, or nothing runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from components.common.errors import DynamoBlobError
from components.common.kv import explain
from components.common.loading.client import ServiceClient, ServiceGone
from graphs.cli._common import add_state, live
from graphs.cli._explain import explained, explanations
from graphs.counters import SOURCES, sources
from graphs.launch import control
from graphs.launch.table import render
from graphs.plan import Plan
from graphs.sockets import control_socket

NO_TIERS = "kv: HBM only; `kv: {profile: ...}` in the graph adds tiers in DRAM and Blob (docs/kv.md)"
ANSWER_S = 2.0  # to wait for a weight service, or for the workers' counters
PIPE_COLUMNS = 240


def add(parser: argparse.ArgumentParser) -> None:
    add_state(parser)
    parser.add_argument(
        "--explain", action="store_true", help="load or recompute: estimates, predicted, actual, regret"
    )
    parser.add_argument("--watch", action="store_true", help="keep the table up to date until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    socket = control_socket(live(args).path)

    def look() -> dict[str, Any]:
        now = control.ask(socket, {"op": "status"})
        plan = Path(now["run_dir"]) / "plan.json"
        more = {"cost": explanations(Plan.read(plan))} if args.explain else {}
        return now | {"served": served(plan), "kv": tiers(plan), "prompt_tokens": prompts(plan)} | more

    snapshot = look()
    if args.json:
        print(json.dumps(snapshot, indent=1))
    elif args.watch:
        with Live(shown(snapshot), console=console(), auto_refresh=False) as view:
            while True:
                time.sleep(1.0)
                view.update(shown(look()), refresh=True)
    else:
        out = console()
        out.print(shown(snapshot))
        for name, found in snapshot.get("cost", {}).items():
            out.print(explained(name, found))
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


def tiers(plan: Path) -> dict[str, list[dict[str, Any]]]:
    """{worker: what each of its KV tiers says of itself, `why` there are no hits included}; workers without tiers are left out."""
    out = {}
    for process in Plan.read(plan).processes if plan.is_file() else ():
        settings = ((process.config or {}).get("kv") or {}).get("settings")
        if settings is not None:
            found = explain.read(str(settings.get("status_file", "")))
            out[process.name] = [s | {"hits": explain.hits(s), "why": explain.why_no_hits(s)} for s in found]
    return out


def prompts(plan: Path) -> dict[str, dict[str, int]]:
    """{worker: prompt tokens by source}, vLLM's own count; workers that do not answer, and fake engines, are left out."""
    found = Plan.read(plan) if plan.is_file() else None
    return asyncio.run(sources(found, ANSWER_S)) if found and found.engine_kind == "vllm" else {}


def prompt_lines(found: dict[str, dict[str, int]]) -> list[Text]:
    """Which tier the prompts' KV came from, one line per worker that had any."""
    out = []
    for worker, tokens in found.items():
        if sum(tokens.values()):
            computed, hbm, moved = (tokens[s] for s in SOURCES)
            origin = "the prefill workers" if worker.startswith("decode") else "DRAM or Blob"
            out.append(Text(f"prompt tokens {worker}: {computed} computed, {hbm} from HBM, {moved} from {origin}"))
    return out


def kv_lines(found: dict[str, list[dict[str, Any]]]) -> list[Text]:
    """One line per worker and tier; another for each reason why there are no hits."""
    out = []
    for worker, said in found.items():
        for status in said:
            out.append(Text(f"kv {worker} {status['store']}: {explain.summary(status)}"))
            out += [
                Text(f"   why no hits: {why}" if not status["hits"] else f"   {why}", "yellow") for why in status["why"]
            ]
        if not said:
            out.append(Text(f"kv {worker}: nothing said yet", "dim"))
    return out


def shown(snapshot: dict[str, Any]) -> Group:
    lines = kv_lines(snapshot.get("kv") or {}) or [Text(NO_TIERS, "dim")]
    return Group(render(snapshot), *prompt_lines(snapshot.get("prompt_tokens") or {}), *lines)


def console() -> Console:
    """A terminal's own width; a pipe or file gets whole lines unless COLUMNS says otherwise."""
    out = Console()
    return out if out.is_terminal or os.environ.get("COLUMNS") else Console(width=PIPE_COLUMNS)


def all_ready(snapshot: dict[str, Any]) -> bool:
    return snapshot["phase"] == "serving" and all(p["state"] == "ready" for p in snapshot["processes"])
