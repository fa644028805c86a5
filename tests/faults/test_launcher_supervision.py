"""The launcher keeps processes running within a budget, drains them, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from components.common.errors import DynamoBlobError
from graphs.launch import proc
from graphs.launch import supervisor as supervising
from graphs.launch.supervisor import Supervisor
from graphs.plan import Plan, Probe
from tests.faults.launcher_stub import plan_of, stub


@pytest.fixture
def ports() -> list[int]:
    """Free ports, chosen by the kernel."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(6)]
    numbers = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return numbers


@asynccontextmanager
async def running(plan: Plan) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(plan)
    supervisor.start()
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        supervisor.stop()
        with suppress(DynamoBlobError):
            await asyncio.wait_for(task, 30)


async def until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.02)


async def ends_with(supervisor: Supervisor, code: str) -> DynamoBlobError:
    with pytest.raises(DynamoBlobError) as e:
        await asyncio.wait_for(supervisor.run(), 30)
    assert e.value.code == code
    return e.value


async def test_starts_in_parallel_and_in_order_of_dependencies(tmp_path: Path, ports: list[int]) -> None:
    plan = plan_of(
        tmp_path, stub("weights-0", ports[0], tmp_path, "--ready-after", "0.6", kind="weights"), stub("decode-0", ports[1], tmp_path, kind="decode"),
        stub("router-0", ports[2], tmp_path, after=("weights-0",)),
    )  # fmt: skip
    async with running(plan) as s:
        await asyncio.wait_for(s.ready.wait(), 20)
        spans = {p["name"]: p for p in s.phases}
        assert spans["router-0"]["start_s"] >= spans["weights-0"]["end_s"]
        assert spans["decode-0"]["start_s"] < spans["weights-0"]["end_s"]
        assert s.snapshot()["phase"] == "serving"
        assert json.loads((tmp_path / "phases.json").read_text())[-1]["name"] == "graph ready"


async def test_ready_comes_from_the_probe_alone_and_says_why_not(tmp_path: Path, ports: list[int]) -> None:
    """Case 45: a graph counted as started before it could serve."""
    async with running(
        plan_of(tmp_path, stub("decode-0", ports[0], tmp_path, "--ready-after", "1.5", kind="decode"))
    ) as s:
        child = s.children["decode-0"]
        await until(lambda: child.why == "still loading")
        assert child.pid and child.state == "starting" and s.phase == "starting"
        await asyncio.wait_for(s.ready.wait(), 20)
        assert child.state == "ready"


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_killed_process_is_restarted_and_its_helpers_and_shared_memory_go(
    tmp_path: Path, ports: list[int], sig: int
) -> None:
    name = f"dynamo-blob-test-{os.getpid()}-{sig}"
    async with running(
        plan_of(tmp_path, stub("decode-0", ports[0], tmp_path, "--helper", "--shm", name, kind="decode"))
    ) as s:
        await asyncio.wait_for(s.ready.wait(), 20)
        child = s.children["decode-0"]
        first = child.pid
        assert first
        await until(lambda: len(proc.session_members(first)) == 2)
        await until(lambda: name in child.shm)
        os.kill(first, sig)
        await until(lambda: child.starts == 2 and child.state == "ready")
        assert proc.session_members(first) == [], "the helper of the killed process lives on"
        assert child.pid != first
    assert name not in os.listdir("/dev/shm")
    assert proc.members(tmp_path, s.sessions()) == []


async def test_the_restart_budget_ends_the_graph_with_the_last_error(tmp_path: Path, ports: list[int]) -> None:
    plan = plan_of(
        tmp_path, stub("decode-0", ports[0], tmp_path, kind="decode", restarts=1), stub("router-0", ports[1], tmp_path)
    )
    s = Supervisor(plan)
    s.start()
    task = asyncio.create_task(s.run())
    child = s.children["decode-0"]
    for start in (1, 2):
        await until(lambda start=start: child.starts == start and child.state == "ready")
        os.kill(child.pid or 0, signal.SIGKILL)
    with pytest.raises(DynamoBlobError) as e:
        await asyncio.wait_for(task, 30)
    assert e.value.code == "LAUNCH-RESTARTS-SPENT" and "SIGKILL" in e.value.why
    assert s.children["router-0"].state == "stopped"
    assert proc.members(tmp_path, s.sessions()) == []


async def test_a_refusal_at_the_first_start_is_shown_not_repeated(tmp_path: Path, ports: list[int]) -> None:
    s = Supervisor(plan_of(tmp_path, stub("decode-0", ports[0], tmp_path, "--exit", "1", kind="decode")))
    s.start()
    error = await ends_with(s, "LAUNCH-START-FAILED")
    assert "STUB-REFUSED" in error.why and "--exit" in error.why
    assert s.children["decode-0"].starts == 1


async def test_a_process_that_never_becomes_ready_fails_the_start_with_its_reason(
    tmp_path: Path, ports: list[int]
) -> None:
    process = stub("decode-0", ports[0], tmp_path, "--ready-after", "60", kind="decode")
    assert process.probe is not None
    process = process.model_copy(update={"probe": process.probe.model_copy(update={"deadline_s": 3.0})})
    s = Supervisor(plan_of(tmp_path, process))
    s.start()
    error = await ends_with(s, "LAUNCH-NOT-READY")
    assert error.why == "still loading"
    assert proc.members(tmp_path, s.sessions()) == []


async def test_a_restart_that_is_late_costs_budget_not_the_graph(tmp_path: Path, ports: list[int]) -> None:
    """Two workers serve, one is killed on a busy machine: its graph goes on, and so do the attempts."""
    may = tmp_path / "may-be-ready"
    may.touch()
    process = stub("decode-0", ports[0], tmp_path, "--ready-when", str(may), kind="decode", restarts=3)
    assert process.probe is not None
    process = process.model_copy(update={"probe": process.probe.model_copy(update={"deadline_s": 3.0})})
    async with running(plan_of(tmp_path, process, stub("router-0", ports[1], tmp_path))) as s:
        await asyncio.wait_for(s.ready.wait(), 20)
        may.unlink()
        child = s.children["decode-0"]
        os.kill(child.pid or 0, signal.SIGKILL)
        await until(lambda: child.starts == 3)
        assert s.failure is None and s.children["router-0"].state == "ready"
        may.touch()
        await until(lambda: child.state == "ready")


async def test_drain_waits_for_answers_and_kills_only_after_the_grace(tmp_path: Path, ports: list[int]) -> None:
    plan = plan_of(
        tmp_path, stub("decode-0", ports[0], tmp_path, "--drain", "0.7", kind="decode"),
        stub("router-0", ports[1], tmp_path, "--stubborn", "--helper", grace_s=1.0),
    )  # fmt: skip
    async with running(plan) as s:
        await asyncio.wait_for(s.ready.wait(), 20)
    assert "drained" in (tmp_path / "logs" / "decode-0.log").read_text()
    assert s.children["decode-0"].popen and s.children["decode-0"].popen.returncode == 0
    assert s.children["router-0"].popen and s.children["router-0"].popen.returncode == -9
    assert proc.members(tmp_path, s.sessions()) == []


async def test_the_gateway_drains_before_the_workers_and_the_store_goes_last(tmp_path: Path, ports: list[int]) -> None:
    kinds = ["azurite", "decode", "frontend"]
    plan = plan_of(
        tmp_path, *(stub(f"{k}-0", p, tmp_path, "--drain", "0.2", kind=k) for k, p in zip(kinds, ports, strict=False))
    )
    ended: list[str] = []
    async with running(plan) as s:
        await asyncio.wait_for(s.ready.wait(), 20)
        for child in s.children.values():
            child.exited.set = _recorder(child.exited.set, ended, child.name)  # type: ignore[method-assign]
    assert ended == ["frontend-0", "decode-0", "azurite-0"]


def _recorder(original: Callable[[], None], ended: list[str], name: str) -> Callable[[], None]:
    def record() -> None:
        ended.append(name)
        original()

    return record


async def test_scale_starts_and_drains_without_touching_the_others(tmp_path: Path, ports: list[int]) -> None:
    one, two = (stub(f"decode-{i}", ports[i], tmp_path, "--drain", "0.2", kind="decode") for i in range(2))
    async with running(plan_of(tmp_path, one)) as s:
        await asyncio.wait_for(s.ready.wait(), 20)
        pid = s.children["decode-0"].pid
        assert await s.scale(plan_of(tmp_path, one, two)) == {"started": ["decode-1"], "drained": []}
        await until(lambda: s.children["decode-1"].state == "ready")
        assert await s.scale(plan_of(tmp_path, one)) == {"started": [], "drained": ["decode-1"]}
        assert "drained" in (tmp_path / "logs" / "decode-1.log").read_text()
        assert s.children["decode-0"].pid == pid and list(s.children) == ["decode-0"]


async def test_a_frozen_process_is_killed_and_restarted_one_that_answers_is_not(
    tmp_path: Path, ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process stopped by a signal showed as unready for ever; its kernel even went on accepting connections."""
    monkeypatch.setattr(supervising, "WATCH_EVERY_S", 0.1)
    healthy = tmp_path / "healthy"
    healthy.touch()
    held = stub("decode-0", ports[3], tmp_path, kind="decode", frozen_s=1.0)
    assert held.probe is not None
    held = held.model_copy(update={"probe": held.probe.model_copy(update={"timeout_s": 0.5})})
    plan = plan_of(
        tmp_path, stub("router-0", ports[0], tmp_path, frozen_s=1.0), stub("router-1", ports[1], tmp_path, frozen_s=0.0),
        stub("router-2", ports[2], tmp_path, "--ready-when", str(healthy), frozen_s=1.0), held,
    )  # fmt: skip
    async with running(plan) as s:
        await asyncio.wait_for(s.ready.wait(), 20)
        frozen, never, refusing, worker = s.children.values()
        monkeypatch.setattr(supervising, "LEASE_S", 1.5)
        time.sleep(2.0)  # noqa: ASYNC251 - the launcher itself was stopped: nobody else was silent
        healthy.unlink()
        for child in (frozen, never):
            os.kill(child.pid or 0, signal.SIGSTOP)
        await until(lambda: frozen.starts == 2 and frozen.state == "ready")
        await until(lambda: never.state == "unready" and "stopped by a signal" in never.why)
        await until(lambda: refusing.state == "unready" and refusing.why == "still loading")
        assert (never.starts, refusing.starts, worker.starts) == (1, 1, 1)
        os.kill(never.pid or 0, signal.SIGCONT)
        await until(lambda: never.state == "ready")
        assert len(frozen.exits) == 1, "it costs the restart budget"


async def test_accepting_a_connection_is_no_answer() -> None:
    """The kernel accepts for a frozen process."""
    import zmq

    from graphs.launch.probe import check

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for probe in (Probe(zmtp=address, timeout_s=0.3), Probe(answers=f"http://{address}/", timeout_s=0.3)):
            assert await check(probe) == "no answer in 0.3 s"

    async def forbid(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 403 No\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(forbid, "127.0.0.1", 0) as server:
        other = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await check(Probe(answers=f"http://{other}/")) == ""
        assert await check(Probe(http=f"http://{other}/")) == "HTTP 403"
        assert "not ZeroMQ" in await check(Probe(zmtp=other))
    assert await check(Probe(zmtp=address)) == await check(Probe(answers=f"http://{address}/")) == "not listening yet"
    with zmq.Context() as context, context.socket(zmq.XPUB) as xpub:
        port = xpub.bind_to_random_port("tcp://127.0.0.1")
        assert await check(Probe(zmtp=f"127.0.0.1:{port}")) == ""


@pytest.mark.parametrize("kind", ["router", "events", "sweeper", "decode"])
async def test_what_serving_does_without_fails_alone_and_is_tried_again(
    tmp_path: Path, ports: list[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Four kills of a router in twenty seconds ended a graph that serves without one. Decode: its second replica."""
    monkeypatch.setattr(supervising, "RETRY_S", 1.0)
    plan = plan_of(
        tmp_path, stub(f"{kind}-1", ports[0], tmp_path, kind=kind, restarts=1), stub("decode-0", ports[1], tmp_path, kind="decode", restarts=0)
    )  # fmt: skip
    s = Supervisor(plan)
    s.start()
    task = asyncio.create_task(s.run())
    child = s.children[f"{kind}-1"]
    await asyncio.wait_for(s.ready.wait(), 20)
    for start in (1, 2):
        await until(lambda start=start: child.starts == start and child.state == "ready")
        os.kill(child.pid or 0, signal.SIGKILL)
    await until(lambda: child.state == "failed")
    assert "ended 2 times in 120 s" in child.why and "SIGKILL" in child.why and "tried again in 1 s" in child.why
    assert s.failure is None and s.phase == "serving" and s.children["decode-0"].state == "ready"
    await until(lambda: child.starts == 3 and child.state == "ready")
    os.kill(s.children["decode-0"].pid or 0, signal.SIGKILL)  # the other way round: what serving needs
    if kind == "decode":
        await until(lambda: s.children["decode-0"].state == "failed")
        os.kill(child.pid or 0, signal.SIGKILL)
    with pytest.raises(DynamoBlobError) as e:
        await asyncio.wait_for(task, 30)
    assert e.value.code == "LAUNCH-RESTARTS-SPENT"
    assert e.value.what.startswith("decode-1" if kind == "decode" else "decode-0")


async def test_a_new_replica_that_refuses_to_start_leaves_the_graph_alone(
    tmp_path: Path, ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "RETRY_S", 30.0)
    one = stub("decode-0", ports[0], tmp_path, kind="decode")
    async with running(plan_of(tmp_path, one)) as s:
        await asyncio.wait_for(s.ready.wait(), 20)
        await s.scale(plan_of(tmp_path, one, stub("decode-1", ports[1], tmp_path, "--exit", "1", kind="decode")))
        child = s.children["decode-1"]
        await until(lambda: child.state == "failed")
        assert "STUB-REFUSED" in child.why and s.failure is None and s.children["decode-0"].state == "ready"
        assert await s.scale(plan_of(tmp_path, one)) == {"started": [], "drained": ["decode-1"]}
