"""kill -9 of the launcher itself: during start, while serving, in its drain; the next start finds everything and begins clean."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from graphs.launch import proc, runs
from graphs.launch.preflight import port_taken
from graphs.plan import Plan
from graphs.sockets import socket_directory
from tests.faults.launcher_stub import plan_of, stub

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    for run in runs.all_runs(tmp_path / "state"):
        proc.end(run.path, run.sessions, grace_s=0.0)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def start(state: Path, plan: Plan, sessions: int = 1) -> subprocess.Popen[str]:
    file = state.parent / "plan.json"
    file.write_text(plan.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.launcher_stub", str(state), str(file), str(sessions)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ready(launcher: subprocess.Popen[str]) -> Path:
    assert launcher.stdout is not None
    line = launcher.stdout.readline()
    assert line.startswith("READY"), line + launcher.stdout.read()
    return Path(line.split()[1])


def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


def plan(port: int, *options: str) -> Plan:
    run = Path("/run-dir")
    return plan_of(run, stub("decode-0", port, run, *options, kind="decode"))


def recorded(state: Path) -> list[runs.Run]:
    return [r for r in runs.all_runs(state) if r.state.get("sessions")]


def assert_next_start_is_clean(state: Path, port: int, shm: str) -> None:
    launcher = start(state, plan(port))
    run = ready(launcher)
    alive = [m for r in runs.all_runs(state) if r.path != run for m in proc.members(r.path, r.sessions)]
    assert alive == [], "processes of the killed launcher live on"
    assert shm not in os.listdir("/dev/shm")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 0
    assert all(r.closed for r in runs.all_runs(state))
    assert not any(socket_directory(r.path).exists() for r in runs.all_runs(state))
    assert port_taken("127.0.0.1", port) == ""


@pytest.mark.parametrize("moment", ["start", "serving", "drain"])
def test_after_kill_9_of_the_launcher_the_next_start_is_clean(state: Path, port: int, moment: str) -> None:
    shm = f"dynamo-blob-test-{os.getpid()}-{moment}"
    options = ["--helper", "--shm", shm, *(["--ready-after", "600"] if moment == "start" else []), "--stubborn"]
    launcher = start(state, plan(port, *options))
    if moment != "start":
        ready(launcher)
    until(lambda: any(shm in r.state.get("shm_files", []) for r in runs.all_runs(state)))
    run = recorded(state)[0]
    assert len(proc.members(run.path, run.sessions)) == 2, "the stub and its helper"
    if moment == "drain":
        launcher.send_signal(signal.SIGTERM)
        until(lambda: runs.Run.read(run.path).state["phase"] == "draining")
    launcher.kill()
    launcher.wait()
    assert len(proc.members(run.path, run.sessions)) == 2, "both ignore SIGTERM, so that there is something to clean"
    assert_next_start_is_clean(state, port, shm)


def test_processes_drain_by_themselves_when_the_launcher_dies(state: Path, port: int) -> None:
    launcher = start(state, plan(port))
    run = ready(launcher)
    launcher.kill()
    launcher.wait()
    until(lambda: proc.members(run, runs.Run.read(run).sessions) == [])
    assert "drained" in (run / "logs" / "decode-0.log").read_text()


def test_two_signals_kill_what_one_would_wait_for(state: Path, port: int) -> None:
    launcher = start(state, plan(port, "--stubborn", "--helper"))
    run = ready(launcher)
    launcher.send_signal(signal.SIGINT)
    until(lambda: runs.Run.read(run).state["phase"] == "draining")
    began = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(30) == 0
    assert time.monotonic() - began < 4.0, "the grace of 5 s was waited for"
    assert proc.members(run, runs.Run.read(run).sessions) == []


def test_a_users_shell_in_the_run_directory_is_left_alone(state: Path, port: int) -> None:
    launcher = start(state, plan(port))
    run = ready(launcher)
    shell = subprocess.Popen(["sleep", "600"], cwd=run / "cwd" / "decode-0", start_new_session=True)
    try:
        launcher.kill()
        launcher.wait()
        runs.sweep(state)
        assert shell.poll() is None
    finally:
        shell.kill()
        shell.wait()


def test_twenty_cycles_leave_nothing(state: Path, port: int) -> None:
    """Three launchers of one graph, one launcher of seventeen: what a launcher itself would gather shows in the latter."""
    before_shm, before_fds = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    own: list[int] = []
    for sessions in (1, 1, 1, 17):
        launcher = start(state, plan(port, "--helper", "--shm", f"dynamo-blob-test-{os.getpid()}-cycle"), sessions)
        assert launcher.stdout is not None
        own.clear()
        for _ in range(sessions):
            ready(launcher)
            launcher.send_signal(signal.SIGTERM)
            closed = launcher.stdout.readline()
            assert closed.startswith("CLOSED"), closed + launcher.stdout.read()
            own.append(int(closed.split()[1]))
        assert launcher.wait(30) == 0
        launcher.stdout.close()
    assert len(set(own[1:])) == 1, "the launcher's descriptors"
    every = runs.all_runs(state)
    assert len(every) == 20 and all(r.closed for r in every)
    assert [m for r in every for m in proc.members(r.path, r.sessions)] == []
    assert {n for n in set(os.listdir("/dev/shm")) - before_shm if n.startswith("dynamo-blob-test-")} == set()
    assert port_taken("127.0.0.1", port) == ""
    assert len(os.listdir("/proc/self/fd")) <= before_fds


def test_stop_now_ends_a_launcher_that_hangs(state: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphs.cli import stop
    from graphs.cli.main import main

    monkeypatch.setattr(stop, "KILL_AFTER_S", 1.0)
    launcher = start(state, plan(port, "--helper"))
    run = runs.Run.read(ready(launcher))
    os.kill(launcher.pid, signal.SIGSTOP)
    assert main(["stop", "--now", "--state", str(state)]) == 0
    assert launcher.wait(10) == -signal.SIGKILL
    assert proc.members(run.path, run.sessions) == [] and port_taken("127.0.0.1", port) == ""
    assert runs.Run.read(run.path).closed


def test_processes_get_as_many_files_as_the_user_may_open() -> None:
    code = (
        "import resource as r; from graphs.launch.child import raise_descriptors as f;"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 4096)); f(); print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(4096, 4096)"
