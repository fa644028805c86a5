"""One process of the plan: spawned in its own session, watched by pidfd, ended with everything it started."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphs.env import PASSED
from graphs.launch import proc
from graphs.launch.runs import write_json
from graphs.plan import Process

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
MOST_LOG_BYTES = 64 << 20
MOST_DESCRIPTORS = 65_536
_CODED = re.compile(r"^[A-Z][A-Z0-9]*(-[A-Z0-9]+)+: ")


def become_subreaper() -> None:
    """Orphans of our children (vLLM's engine processes) come to us instead of to init, so that we see and end them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def raise_descriptors() -> None:
    """The soft limit of open files to the hard one, for all that is started: a login shell's 1,024 is too few for a
    gateway (two per stream). Not beyond MOST_DESCRIPTORS: some programs walk all of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _dies_with(parent: int) -> None:
    """In the child, before exec: SIGTERM (so: drain) when the launcher dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died between fork and prctl
        os._exit(1)


def environment(process: Process, base: Mapping[str, str]) -> dict[str, str]:
    """Exactly what the process gets: four variables of the user's, and the plan's.

    Dynamo's frontend keeps model cards under HOME. Without a directory there it would never list a model, and
    wait: a HOME that is unset, relative or read-only (a service account's) is replaced by the working directory.
    """
    out = {**{k: base[k] for k in PASSED if k in base}, **process.env}
    home = out.get("HOME", "")
    if not (os.path.isabs(home) and os.path.isdir(home) and os.access(home, os.W_OK | os.X_OK)):
        out["HOME"] = process.cwd
    return out


class Child:
    """Life of one process over its restarts. States: waiting, starting, ready, unready, backing-off, draining, stopped, failed."""

    def __init__(self, process: Process, run_dir: Path) -> None:
        self.process, self.log = process, run_dir / "logs" / f"{process.name}.log"
        self.state, self.why = "waiting", ""
        self.popen: subprocess.Popen[bytes] | None = None
        self.start_ticks = 0
        self.began = self.spawned = 0.0
        self.ready_after: float | None = None
        self.was_ready = False
        self.starts = 0
        self.failures = 0
        """Times it was given up while the graph went on."""
        self.exits: deque[float] = deque(maxlen=200)
        self.ready, self.exited = asyncio.Event(), asyncio.Event()
        self.stopping = False
        self.shm: set[str] = set()

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def pid(self) -> int | None:
        return self.popen.pid if self.popen and self.popen.returncode is None else None

    def spawn(self) -> None:
        """Start the process. Raises OSError."""
        p = self.process
        if p.config is not None:
            write_config(Path(p.config_path), p.config)
        for path in p.sockets:
            Path(path).unlink(missing_ok=True)  # a killed predecessor's socket
        Path(p.cwd).mkdir(parents=True, exist_ok=True)
        self.exited.clear()
        self.ready.clear()
        self.starts += 1
        parent = os.getpid()
        with open(self.log, "ab", buffering=0) as log:
            with suppress(OSError):  # a full disk
                log.write(f"--- start {self.starts} at {time.strftime('%H:%M:%S')}: {' '.join(p.argv)}\n".encode())
                log.flush()
            self.popen = subprocess.Popen(
                p.argv, env=environment(p, os.environ), cwd=p.cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=lambda: _dies_with(parent),
            )  # fmt: skip
        found = proc.stat(self.popen.pid)
        self.start_ticks, self.spawned, self.state, self.why = (
            found.start if found else 0,
            time.monotonic(),
            "starting",
            "",
        )
        try:
            fd = os.pidfd_open(self.popen.pid)
        except OSError:  # no descriptor left: nobody would see it end
            self.popen.kill()
            self.popen.wait()
            self.exited.set()
            raise
        asyncio.get_running_loop().add_reader(fd, self._on_exit, fd)

    def _on_exit(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        assert self.popen is not None
        self.popen.wait()
        self.exited.set()

    def signal(self, sig: int) -> None:
        """To the whole session: the process and everything it started."""
        if self.popen is None:
            return
        if sig == signal.SIGTERM:  # the process itself passes a drain on; its helpers must outlive it
            if self.popen.returncode is None:
                self.popen.send_signal(sig)
            return
        for pid in proc.session_members(self.popen.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, sig)

    async def end_session(self, deadline_s: float = 5.0) -> None:
        """After the process itself is gone: end what it left, free its shared memory."""
        if self.popen is None:
            return
        end = time.monotonic() + deadline_s
        while proc.session_members(self.popen.pid) and time.monotonic() < end:
            self.signal(signal.SIGKILL)
            reap_adopted({self.popen.pid})
            await asyncio.sleep(0.02)
        proc.unlink_shm(self.shm)
        self.shm.clear()

    async def stop(self, deadline_s: float) -> None:
        """SIGTERM, wait for the drain, SIGKILL to the session after `deadline_s`."""
        self.stopping = True
        if self.pid is not None:
            self.state, self.why = "draining", ""
            self.signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), deadline_s)
            if not self.exited.is_set():
                self.why = f"killed after {deadline_s:g} s of drain"
                self.signal(signal.SIGKILL)
                await self.exited.wait()
        await self.end_session()
        self.state = "stopped"

    def exit_text(self) -> str:
        """How it ended, and the error it printed last."""
        code = self.popen.returncode if self.popen else None
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        error = last_error(self.log)
        return f"{how}; {error}" if error else how

    def rotate(self) -> None:
        """Logs are bounded: beyond the limit the file is moved aside once (the process appends, so truncating is safe)."""
        with suppress(OSError):
            if self.log.stat().st_size > MOST_LOG_BYTES:
                self.log.with_suffix(".log.1").write_bytes(self.log.read_bytes())
                os.truncate(self.log, 0)

    def snapshot(self) -> dict[str, Any]:
        p = self.process
        return {
            "name": p.name, "component": p.component, "state": self.state, "why": self.why, "pid": self.pid, "restarts": max(0, self.starts - 1),
            "ready_after_s": self.ready_after, "ports": {port.name: port.number for port in p.ports}, "log": str(self.log),
        }  # fmt: skip


def write_config(path: Path, config: dict[str, Any]) -> None:
    """The plan file of a process. On a full disk the one of its last start serves as well, if it says the same."""
    try:
        write_json(path, config)
    except OSError:
        try:
            same = json.loads(path.read_text()) == json.loads(json.dumps(config))
        except (OSError, ValueError):
            same = False
        if not same:
            raise


def tail(path: Path, most: int = 16384) -> list[str]:
    try:
        with open(path, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - most))
            return f.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def last_error(log: Path) -> str:
    """The last coded error of a log with its indented lines, in one line; else the last line."""
    lines = [x for x in tail(log) if x.strip()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith("--- start"):
            break
        if _CODED.match(lines[i]):
            block = [lines[i], *(x.strip() for x in lines[i + 1 : i + 5] if x.startswith("  "))]
            return " | ".join(block)
    last = lines[-1] if lines else ""
    return "" if last.startswith("--- start") else last[:300]


def reap_adopted(ours: set[int]) -> int:
    """Collect orphans that came to us as subreaper and have ended. `ours` are reaped by their own `Child`."""
    count = 0
    for pid in _children():
        if pid not in ours:
            with suppress(ChildProcessError):
                count += os.waitpid(pid, os.WNOHANG)[0] == pid
    return count


def _children() -> list[int]:
    with suppress(OSError):
        return [
            int(x)
            for t in os.listdir("/proc/self/task")
            for x in Path(f"/proc/self/task/{t}/children").read_text().split()
        ]
    me = os.getpid()
    return [p for p in proc.pids() if (s := proc.stat(p)) is not None and s.parent == me]
