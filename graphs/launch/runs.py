"""Run directories: one per start, with everything about it; and what a dead launcher left behind.

.state/runs/<time>-<graph>/
  state.json      who runs, in which state (rewritten by rename); `phase: closed` once nothing is left
  plan.json       the compiled plan            phases.json   where the start's time went
  logs/ plans/ reports/ credentials/ discovery/ cwd/ s/ (sockets, control.sock among them)
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError
from graphs.launch import proc
from graphs.site import Site
from graphs.sockets import socket_directory

REPOSITORY = Path(__file__).resolve().parents[2]
KEEP_RUNS = 20
FULL_BYTES = 16 << 20


def default_state() -> Path:
    return REPOSITORY / ".state"


def write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1))
    os.replace(temporary, path)


@dataclass
class Run:
    """One run directory, as read from its state.json."""

    path: Path
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Run:
        try:
            state = json.loads((path / "state.json").read_text())
        except (OSError, ValueError, RecursionError):
            state = {}
        return cls(path, _sound(state))

    @property
    def launcher_alive(self) -> bool:
        who = self.state.get("launcher") or {}
        return bool(who) and proc.alive(who["pid"], who["start"])

    @property
    def closed(self) -> bool:
        return self.state.get("phase") in ("closed", "swept")

    @property
    def sessions(self) -> set[int]:
        return {int(s) for s in self.state.get("sessions", [])}


def _sound(state: Any) -> dict[str, Any]:
    """What can be believed of a state.json: a file that a crash or an editor damaged must not stop the next start."""

    def whole(x: Any) -> bool:
        return type(x) is int and 0 < x < 1 << 63

    out = dict(state) if isinstance(state, dict) else {}
    who = out.get("launcher")
    fits = {
        "launcher": isinstance(who, dict) and whole(who.get("pid")) and whole(who.get("start")),
        "sessions": isinstance(out.get("sessions"), list) and all(map(whole, out["sessions"])),
        "shm_files": isinstance(out.get("shm_files"), list) and all(isinstance(x, str) for x in out["shm_files"]),
        **{name: isinstance(out.get(name), str) for name in ("phase", "graph", "shm_dir")},
    }
    return {k: v for k, v in out.items() if fits.get(k, True)}


@contextmanager
def usable(state: Path) -> Iterator[None]:
    """Around what writes to a state directory. Raises LAUNCH-STATE-DIR when it cannot be written."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as e:
        raise DynamoBlobError(
            "LAUNCH-STATE-DIR", "the state directory cannot be used", where=str(e.filename or state), why=str(e.strerror or e),
            do="make it a directory this user may write to, with room, or give another: --state DIR",
        ) from None  # fmt: skip


def full_disk(state: Path, error: DynamoBlobError) -> DynamoBlobError | None:
    """The true reason when the store failed because its disk is full: Azurite only falls silent then."""
    free = shutil.disk_usage(state).free
    if not error.code.startswith("STORAGE-") or free >= FULL_BYTES:
        return None
    return DynamoBlobError(
        "LAUNCH-DISK-FULL", "the disk of the state directory is full", where=str(state), why=f"{free >> 20} MiB are left; then {error.code}: {error.what}",
        do="make room, or use another: --state DIR",
    )  # fmt: skip


def all_runs(state: Path) -> list[Run]:
    """Newest first."""
    folder = state / "runs"
    return [Run.read(p) for p in sorted(folder.iterdir(), reverse=True) if p.is_dir()] if folder.is_dir() else []


def live_run(state: Path, graph: str = "") -> Run:
    """The newest run whose launcher lives. Raises LAUNCH-NOT-RUNNING."""
    for run in all_runs(state):
        if run.launcher_alive and not run.closed and (not graph or run.state.get("graph") == graph):
            return run
    raise DynamoBlobError(
        "LAUNCH-NOT-RUNNING",
        "no graph runs here",
        where=str(state / "runs"),
        do="start one: dynamo serve graphs/disagg.yaml",
    )


def new_run(state: Path, graph: str) -> Path:
    stem = time.strftime("%Y%m%d-%H%M%S") + f"-{graph}"
    (state / "runs").mkdir(parents=True, exist_ok=True)
    for n in range(1, 1000):
        path = state / "runs" / (stem if n == 1 else f"{stem}-{n}")
        try:
            path.mkdir(mode=0o700)
            me = proc.stat(os.getpid())
            assert me is not None
            write_json(
                path / "state.json",
                {"graph": graph, "phase": "preflight", "launcher": {"pid": me.pid, "start": me.start}},
            )
            return path
        except FileExistsError:
            continue
    raise DynamoBlobError("LAUNCH-RUN-DIR", "no free name for a run directory", where=str(state / "runs"))


def sweep(state: Path) -> list[str]:
    """End what dead launchers left: processes, shared memory, sockets, credentials. Returns what was done, in words."""
    done = []
    for run in all_runs(state):
        if run.closed or run.launcher_alive or not _abandoned(run):
            continue
        before = proc.members(run.path, run.sessions)
        survivors = proc.end(run.path, run.sessions)
        if survivors:
            raise DynamoBlobError(
                "LAUNCH-LEFTOVER", "processes of an earlier run cannot be ended", where=str(run.path), why=f"pids {survivors}",
                do="end them by hand, then start again",
            )  # fmt: skip
        files = remove_traces(run)
        write_json(run.path / "state.json", {**run.state, "phase": "swept"})
        if before or files:
            done.append(f"{run.path.name}: ended {len(before)} processes, removed {len(files)} shared-memory files")
    for run in all_runs(state)[KEEP_RUNS:]:
        if run.closed:
            shutil.rmtree(run.path, ignore_errors=True)
    return done


def _abandoned(run: Run) -> bool:
    """The moment between making a directory and naming its launcher in it is short: after a minute it is over (or before: clocks are set)."""
    return bool(run.state.get("launcher")) or abs(time.time() - run.path.stat().st_mtime) > 60


def remove_traces(run: Run) -> list[str]:
    """Everything of an ended run that must not stay: shared memory, sockets, credentials, discovery entries."""
    files = proc.unlink_shm(run.state.get("shm_files", []))
    shm = Site(run=run.path, state=run.path).shm  # follows from the path alone, so that lost notes do not matter
    if shm.is_dir():
        files.append(str(shm))
        _remove_tree(shm)
    for name in ("credentials", "discovery", "cwd"):
        shutil.rmtree(run.path / name, ignore_errors=True)
    shutil.rmtree(socket_directory(run.path), ignore_errors=True)
    return files


def _remove_tree(path: Path) -> None:
    """Cached weights are read-only on purpose (0444 in 0555 directories); removing them needs the directories writable."""
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)
    shutil.rmtree(path, ignore_errors=True)


class Lock:
    """An exclusive lock on a state directory's embedded store: two Azurites on one directory destroy it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+")  # noqa: SIM115 - held for the life of the run
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise DynamoBlobError(
                "LAUNCH-STORE-BUSY", "another graph uses this embedded store", where=str(path.parent), why="its launcher holds the lock",
                do="stop it (`dynamo stop`), or start with --state ANOTHER_DIRECTORY",
            ) from None  # fmt: skip

    def release(self) -> None:
        self._file.close()
