"""Case 45 (dynamo#3567): a graph was called successful before it was ready.

A process that runs, listens and answers its liveness, but is not ready, keeps the graph at "starting"; it becomes
"serving" with the last readiness, and leaves that state's meaning to probes again when one is lost. In a cluster the same
holds: every container of the rendered graph that serves has a readiness probe on what the plan's own probe asks.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from components.common.errors import DynamoBlobError
from graphs.launch.supervisor import Supervisor
from graphs.render.pods import pods
from tests.faults.launcher_stub import plan_of, stub
from tests.golden import rendering


async def _until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.02)


async def test_a_graph_is_serving_when_its_last_process_is_ready_and_not_before(tmp_path: Path) -> None:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    a, b = (s.getsockname()[1] for s in held)
    for s in held:
        s.close()
    gate = tmp_path / "gate"
    plan = plan_of(tmp_path, stub("early-0", a, tmp_path), stub("late-0", b, tmp_path, "--ready-when", str(gate)))
    supervisor = Supervisor(plan)
    supervisor.start()
    running = asyncio.create_task(supervisor.run())
    try:
        await _until(lambda: supervisor.children["early-0"].ready.is_set())
        await _until(lambda: _answers(b))  # it runs and listens; that is not ready
        assert supervisor.phase == "starting" and not supervisor.ready.is_set()
        assert supervisor.snapshot()["phase"] == "starting"
        gate.touch()
        await asyncio.wait_for(supervisor.ready.wait(), 20)
        assert supervisor.snapshot()["phase"] == "serving"
    finally:
        supervisor.stop()
        with suppress(DynamoBlobError):
            await asyncio.wait_for(running, 30)


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    return False


@pytest.mark.parametrize("name", ["disagg.yaml", "aks/gpt-oss-120b-h200.yaml"])
def test_every_pod_is_ready_by_the_plans_own_probe(name: str) -> None:
    for pod in pods(rendering.plan_of(rendering.ROOT / "graphs" / name)):
        probe, main = pod.main.probe, pod.main_container
        assert probe is not None
        ready = main["readinessProbe"]
        if probe.http:
            assert f":{ready['httpGet']['port']}{ready['httpGet']['path']}" == probe.http[probe.http.index(":", 6) :]
        else:
            assert ready["exec"]["command"][-3:-1] == ["--unix-socket", probe.unix_http[5:].rpartition(":")[0]]
        assert ready["timeoutSeconds"] >= probe.timeout_s
        assert main["livenessProbe"] != ready  # a worker that loads is alive and not ready
