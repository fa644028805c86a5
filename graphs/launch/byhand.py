"""A graph without the launcher: its processes as shell commands, and what the launcher would have made for them.

A dry run starts nothing. It writes account keys and credential files (mode 0600), because the printed commands read
them, and prints `python -m graphs.launch.byhand` where the launcher publishes: into the store that runs by then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import threading
import time
from pathlib import Path

from components.common.errors import DynamoBlobError
from graphs.compile import compile_plan
from graphs.env import PASSED, RUN_MARK
from graphs.launch import runs, store
from graphs.load import Graph, read_graph
from graphs.plan import Plan
from graphs.site import Release, Site

CREDENTIALS_S = 86_400.0
"""Life of what a dry run writes: nobody renews it."""
STORE_S = 60.0


def prepared(path: str, sets: list[str], state: Path) -> tuple[Graph, Plan]:
    """The graph and its plan; with the embedded store, keys and credential files are there when it returns.

    The release's digests are filled in when this store knows them. Raises LAUNCH-STATE-DIR and what reading and compiling raise.
    """
    graph = read_graph(path, sets)
    site = Site(run=state / "runs" / f"dry-run-{graph.spec.graph}", state=state)
    if graph.spec.storage.embedded != "azurite":
        return graph, compile_plan(graph, site)
    compile_plan(graph, site)  # refuses what cannot be planned before anything is written
    with runs.usable(state):
        site.run.mkdir(parents=True, exist_ok=True, mode=0o700)
        (site.run / "state.json").unlink(missing_ok=True)  # what a sweep wrote: these files are new
        for grant in store.grants(graph, site, CREDENTIALS_S):
            grant.write()
        release = store.known_release(graph, site) or Release(
            graph.spec.model.version,
            publisher_keys=(store.local_key(site, "publisher").public,),
            approver_keys=(store.local_key(site, "approver").public,),
        )
    return graph, compile_plan(graph, dataclasses.replace(site, release=release))


def as_shell(plan: Plan, publish: list[str] | None = None, lock: Path | None = None) -> str:
    """The plan as a shell script in start order; each command also runs alone. Secrets are files; only their paths appear.

    `publish`: arguments of the step after the store; `lock`: the store's lock, which the launcher takes as well.
    """
    lines = ["# every process of the graph, runnable by hand; nothing but these variables reaches it"]
    if publish:
        lines += [
            f"# {time.strftime('%H:%M')}: account keys and credential files were written (mode 0600) and are valid for 24 h; nothing was started.",
            "# Another dry run renews them; the next `dynamo serve` with this state ends what runs and removes them.",
        ]
    lines += ["# run as one script, Ctrl-C stops everything; by hand: kill each by its pid", "set -u; umask 077"]
    if lock:
        lines += [
            f"exec 9>>{shlex.quote(str(lock))}; flock -n 9 || {{ echo 'another graph uses this store' >&2; exit 1; }}"
        ]
    lines += ["trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT; trap exit INT TERM"]
    lines += [f"mkdir -p {' '.join(shlex.quote(d) for d in plan.dirs)}", ""]
    passed = " ".join(f'{name}="${{{name}-}}"' for name in PASSED)
    for p in plan.processes:
        after = f"  (after {', '.join(p.after)})" if p.after else ""
        lines.append(f"# {p.name}{after}")
        if p.config is not None:
            lines += [f"cat > {shlex.quote(p.config_path)} <<'JSON'", json.dumps(p.config, indent=1), "JSON"]
        lines.append(f"( cd {shlex.quote(p.cwd)} && exec env -i {passed} \\")
        lines += [f"  {shlex.quote(f'{k}={v}')} \\" for k, v in p.env.items()]
        lines += [f"  {shlex.join(p.argv)} ) &", ""]
        if p.component == "azurite" and publish:
            lines += [
                "# waits for the store, makes its containers, publishes and approves the release where it is missing"
            ]
            lines += [f"{shlex.join(publish)} || exit 1", ""]
    return "\n".join([*lines, "wait", ""])


def script(args: argparse.Namespace, state: Path) -> str:
    graph, plan = prepared(args.graph, args.set, state)
    if graph.spec.storage.embedded != "azurite":
        return as_shell(plan)
    sets = [x for item in args.set for x in ("--set", item)]
    file = str(Path(args.graph).absolute())
    publish = [
        "env",
        f"{RUN_MARK}={plan.run_dir}",
        sys.executable,
        "-m",
        "graphs.launch.byhand",
        file,
        "--state",
        str(state),
        *sets,
    ]
    return as_shell(plan, publish, state / "azurite.lock")


def main(argv: list[str] | None = None) -> int:
    """Publish into the store that was started by hand."""
    parser = argparse.ArgumentParser(prog="python -m graphs.launch.byhand")
    parser.add_argument("graph")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--state", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        graph = read_graph(args.graph, args.set)
        site = Site(run=args.state / "runs" / f"dry-run-{graph.spec.graph}", state=args.state)
        end = time.monotonic() + STORE_S
        while True:
            try:
                store.ensure_containers(graph, site)
                break
            except DynamoBlobError as e:
                if not e.code.startswith("STORAGE-") or time.monotonic() > end:
                    raise
                time.sleep(0.2)
        store.publish_missing(graph, site, lambda line: print(line, flush=True), threading.Event())
    except DynamoBlobError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
