"""A running graph for tests: started by the real `dynamo serve`, asked over its API, stopped and inspected."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from graphs.launch import control, proc, runs
from graphs.plan import Plan
from graphs.sockets import control_socket

ROOT = Path(__file__).resolve().parents[2]
PORTS_NEEDED = 70


def free_base() -> int:
    """First of a range of free ports below the ephemeral ones."""
    for base in range(20_100 + (os.getpid() % 60) * 100, 32_000, 100):
        held = []
        with suppress(OSError):
            for n in range(PORTS_NEEDED):
                held.append(socket.create_server(("127.0.0.1", base + n)))
        for s in held:
            s.close()
        if len(held) == PORTS_NEEDED:
            return base
    raise AssertionError("no free range of ports")


def until(condition: Callable[[], bool], deadline_s: float = 60.0, what: str = "the condition") -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true in {deadline_s:g} s"
        time.sleep(0.05)


class Served:
    """One `dynamo serve` process."""

    def __init__(self, graph: str, state: Path, *sets: str) -> None:
        base = free_base()
        self.state, self.port = state, base + PORTS_NEEDED - 1
        self.log = open(state.parent / f"serve-{base}.log", "w+")  # noqa: SIM115 - lives as long as the process
        argv = [
            sys.executable,
            "-m",
            "graphs.cli.main",
            "serve",
            str(ROOT / "graphs" / f"{graph}.yaml"),
            "--state",
            str(state),
        ]
        for item in (f"network.base_port={base}", f"components.frontend.listen=127.0.0.1:{self.port}", *sets):
            argv += ["--set", item]
        self.process = subprocess.Popen(argv, cwd=ROOT, stdout=self.log, stderr=subprocess.STDOUT)
        self.run_dir = Path()

    def wait_ready(self, deadline_s: float = 180.0) -> Served:
        end = time.monotonic() + deadline_s
        while True:
            found = [
                r for r in runs.all_runs(self.state) if (r.state.get("launcher") or {}).get("pid") == self.process.pid
            ]
            if found and found[0].state.get("phase") == "serving":
                self.run_dir = found[0].path
                return self
            if self.process.poll() is not None or time.monotonic() > end:
                self.log.seek(0)
                raise AssertionError(
                    f"the graph did not start (exit {self.process.poll()}):\n{self.log.read()[-3000:]}"
                )
            time.sleep(0.1)

    @property
    def plan(self) -> Plan:
        return Plan.read(self.run_dir / "plan.json")

    def status(self) -> dict[str, Any]:
        return control.ask(control_socket(self.run_dir), {"op": "status"})

    def row(self, name: str) -> dict[str, Any]:
        return next(p for p in self.status()["processes"] if p["name"] == name)

    def members(self) -> list[proc.Stat]:
        return proc.members(self.run_dir, runs.Run.read(self.run_dir).sessions)

    def listening(self) -> list[tuple[str, str, int]]:
        """(process, address, port) of every listening socket of the whole tree, the launcher included."""
        names = {p["pid"]: p["name"] for p in self.status()["processes"]}
        out = []
        for pid in [self.process.pid, *(m.pid for m in self.members())]:
            with suppress(psutil.Error):
                for c in psutil.Process(pid).net_connections("inet"):
                    if c.laddr and not c.raddr and c.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                        out.append((names.get(pid, str(pid)), c.laddr.ip, c.laddr.port))
        return out

    def chat(self, text: str, max_tokens: int = 8, timeout_s: float = 60.0, **more: Any) -> tuple[int, Any]:
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            body = {
                "model": self.plan.served_model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": max_tokens,
                "temperature": 0,
                **more,
            }
            c.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            answer = c.getresponse()
            data = answer.read()
            return answer.status, json.loads(data) if not more.get("stream") else data.decode()
        finally:
            c.close()

    def stop(self, deadline_s: float = 120.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(deadline_s)
        finally:
            self.log.close()


@contextmanager
def serving(graph: str, state: Path, *sets: str) -> Iterator[Served]:
    served = Served(graph, state, *sets)
    try:
        yield served.wait_ready()
    finally:
        if served.process.poll() is None:
            served.stop()
        for run in runs.all_runs(state):
            proc.end(run.path, run.sessions, grace_s=0.0)
