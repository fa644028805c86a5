"""What /proc knows: start times, sessions, members of a run, shared memory in use. Linux only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from graphs.env import RUN_MARK


class Stat(NamedTuple):
    pid: int
    parent: int
    session: int
    state: str
    start: int
    """Clock ticks after boot: with the pid, a name that is never used twice while the machine is up."""


def stat(pid: int) -> Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    rest = text.rpartition(b")")[2].split()
    return Stat(pid, int(rest[1]), int(rest[3]), rest[0].decode(), int(rest[19]))


def alive(pid: int, start: int) -> bool:
    """Does the process that had this pid and start time still run (a zombie does not)?"""
    found = stat(pid)
    return found is not None and found.start == start and found.state not in "ZX"


def pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def members(run_dir: Path, sessions: Iterable[int]) -> list[Stat]:
    """Living processes of a run: working directory inside `run_dir`/cwd, and our mark or one of our sessions.

    Two marks, because each alone can mislead: a user's shell may stand in the run directory, and titles
    set by workers overwrite the environment that /proc shows.
    """
    base, known, out = str(run_dir / "cwd") + "/", set(sessions), []
    for pid in pids():
        try:
            cwd = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue
        if not (cwd.removesuffix(" (deleted)") + "/").startswith(base):
            continue
        found = stat(pid)
        if found and found.state not in "ZX" and (found.session in known or _marked(pid, run_dir)):
            out.append(found)
    return out


def _marked(pid: int, run_dir: Path) -> bool:
    try:
        return f"{RUN_MARK}={run_dir}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def session_members(session: int) -> list[int]:
    return [p for p in pids() if _in_session(p, session) and (s := stat(p)) is not None and s.state not in "ZX"]


def _in_session(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session  # a thirtieth of reading /proc/PID/stat
    except OSError:
        return False


def kill_all(found: Iterable[Stat], sig: int) -> None:
    for one in found:
        if alive(one.pid, one.start):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, sig)


def end(run_dir: Path, sessions: Iterable[int], grace_s: float = 2.0, deadline_s: float = 10.0) -> list[int]:
    """Stop every process of a run: SIGTERM, after `grace_s` SIGKILL. Returns pids that outlived `deadline_s`."""
    known = list(sessions)
    began, sig = time.monotonic(), signal.SIGTERM
    left = members(run_dir, known)
    kill_all(left, sig)
    while left and time.monotonic() - began < deadline_s:
        time.sleep(0.05)
        left = members(run_dir, known)
        if time.monotonic() - began > grace_s:
            kill_all(left, signal.SIGKILL)
    return [s.pid for s in left]


SHM = Path("/dev/shm")


def shm_in_use(of: Iterable[int]) -> set[str]:
    """Names under /dev/shm that these processes map or hold open."""
    names: set[str] = set()
    for pid in of:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                at = line.find("/dev/shm/")
                if at >= 0:
                    names.add(line[at + 9 :].removesuffix(" (deleted)"))
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    link = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if link.startswith("/dev/shm/"):
                        names.add(link[9:].removesuffix(" (deleted)"))
    return names


def unlink_shm(names: Iterable[str]) -> list[str]:
    """Remove those of `names` that no living process uses; returns what was removed."""
    wanted = {n for n in names if n and "/" not in n and (SHM / n).is_file()}
    if not wanted:
        return []
    free = sorted(wanted - shm_in_use(pids()))
    for name in free:
        (SHM / name).unlink(missing_ok=True)
    return free


def inotify_in_use() -> int:
    """inotify instances this user holds, as far as /proc shows them."""
    count, uid = 0, os.getuid()
    for pid in pids():
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid != uid:
                continue
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    count += os.readlink(f"/proc/{pid}/fd/{fd}") == "anon_inode:inotify"
    return count
