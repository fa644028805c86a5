"""`dynamo publish` and `dynamo release` beside a graph that holds the embedded store: they ask its port, not the default one."""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphs.cli import _registry
from graphs.cli._registry import open_registry, served_port
from graphs.launch import proc, runs
from graphs.site import OFFSETS


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def write_run(state: Path, processes: list[object]) -> None:
    run = state / "runs" / "r1"
    run.mkdir(parents=True, exist_ok=True)
    own = proc.stat(os.getpid())
    assert own is not None
    me = {"pid": os.getpid(), "start": own.start}
    runs.write_json(run / "state.json", {"graph": "g", "phase": "starting", "launcher": me, "processes": processes})


def azurite(port: object) -> dict[str, object]:
    return {"name": "azurite-0", "component": "azurite", "ports": {"blob": port}}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def test_nobody_holds_the_store(tmp_path: Path, listener: socket.socket) -> None:
    assert served_port(tmp_path, listener.getsockname()[1]) is None


def test_a_graph_on_other_ports_is_asked_there(tmp_path: Path, listener: socket.socket) -> None:
    lock = runs.Lock(tmp_path / "azurite.lock")
    port = listener.getsockname()[1]
    write_run(tmp_path, [None, {"component": "router", "ports": {"blob": 1}}, azurite("x"), azurite(port)])
    assert served_port(tmp_path, free_port(), 5.0) == port
    lock.release()


def test_another_call_of_the_command_uses_the_default(tmp_path: Path, listener: socket.socket) -> None:
    lock = runs.Lock(tmp_path / "azurite.lock")
    assert served_port(tmp_path, listener.getsockname()[1], 5.0) == listener.getsockname()[1]
    lock.release()


def test_a_starting_graph_is_waited_for_and_the_default_port_is_not_mistaken_for_it(
    tmp_path: Path, listener: socket.socket
) -> None:
    lock = runs.Lock(tmp_path / "azurite.lock")
    write_run(tmp_path, [])
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        timer = threading.Timer(0.3, write_run, (tmp_path, [azurite(listener.getsockname()[1])]))
        timer.start()
        assert served_port(tmp_path, foreign.getsockname()[1], 10.0) == listener.getsockname()[1]
        timer.join()
    lock.release()


def test_a_graph_that_goes_leaves_the_store_to_us(tmp_path: Path) -> None:
    lock = runs.Lock(tmp_path / "azurite.lock")
    write_run(tmp_path, [azurite(free_port())])
    timer = threading.Timer(0.3, lock.release)
    timer.start()
    assert served_port(tmp_path, free_port(), 10.0) is None
    timer.join()


def calls(tmp_path: Path, name: str) -> argparse.Namespace:
    """Arguments of a call with a graph file of its own, so ports of its own, on the state directory of all."""
    base = next(b for b in range(20000 + os.getpid() % 5000, 32000, 100) if _free(b + OFFSETS["azurite"]))
    file = tmp_path / f"{name}.yaml"
    text = (runs.REPOSITORY / "graphs" / "disagg.yaml").read_text()
    file.write_text(f"{text}\nnetwork: {{base_port: {base}}}\n")
    return argparse.Namespace(
        graph=str(file), state=tmp_path / "state", account="", container="", sas_file="", client_id="", ca_bundle=""
    )


def _free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
        return True
    except OSError:
        return False


def test_a_call_that_joined_another_keeps_the_store_until_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once the first of two calls took the store with it, and the second met STORAGE-REFUSED half-way."""
    first, second = threading.Event(), threading.Event()
    here = calls(tmp_path, "a")

    def owner() -> None:
        with open_registry(here, "publisher"):
            first.set()
            second.wait(30)
        first.clear()

    thread = threading.Thread(target=owner)
    thread.start()
    assert first.wait(30)
    args = calls(tmp_path, "b")  # `a` listens by now: another port
    with open_registry(args, "publisher") as joined:
        second.set()
        thread.join(3)
        assert thread.is_alive() and first.is_set()
        joined.account.create("weights", "objects/x", b"x")
        assert joined.account.get("weights", "objects/x") == b"x"
    thread.join(30)
    assert not thread.is_alive()
    assert "another command still uses the store" in capsys.readouterr().err
    assert served_port(tmp_path / "state", 1) is None


def test_two_calls_that_start_at_once_share_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, gate, met, seen = calls(tmp_path, "a"), threading.Barrier(2), threading.local(), []

    def both_find_nobody(state: Path, default: int) -> int | None:
        found = served_port(state, default)
        if not hasattr(met, "once"):
            met.once = gate.wait(120)
            assert found is None
        return found

    monkeypatch.setattr(_registry, "served_port", both_find_nobody)

    def call(number: int) -> None:
        with open_registry(args, "publisher") as r:
            r.account.create("weights", f"objects/{number}", b"x")
            seen.append(r.account.get("weights", f"objects/{number}"))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(240)
    assert seen == [b"x"] * 2


def test_the_wait_for_other_calls_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(_registry, "OTHERS_S", 0.2)
    with _registry._users(tmp_path) as other, _registry._users(tmp_path) as mine:
        fcntl.flock(other, fcntl.LOCK_SH)
        _registry._until_unused(mine)
        assert "did not end within" in capsys.readouterr().err
