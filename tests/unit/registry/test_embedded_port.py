"""`dynamo publish` and `dynamo release` beside a graph that holds the embedded store: they ask its port, not the default one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphs.cli._registry import served_port
from graphs.launch import proc, runs


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
