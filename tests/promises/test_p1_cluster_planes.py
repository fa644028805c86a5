"""P1: the main job on the planes of a cluster. Real engines (SmolLM2), etcd discovery and NATS events, both real, on loopback.

Each loses its server once while the graph serves: known workers go on answering, and the answer stays the same.
Lost leases and longer absences are shown with the mock engine, which starts faster (tests/cases/test_case_43_lease_loss.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import aiohttp
import pytest

from tests import planes
from tests.e2e.graph import Graph, base_port, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
RECOVER_S = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Graph, planes.Plane, planes.Plane]]:
    directory = tmp_path_factory.mktemp("planes")
    port = int(os.environ.get("DYNAMO_BLOB_TEST_PORT", base_port() + 100))
    etcd, nats = planes.etcd(port + 90, directory), planes.nats(port + 92, directory)
    sets = (f"runtime.etcd_url=http://127.0.0.1:{etcd.port}", f"runtime.nats_url=nats://127.0.0.1:{nats.port}")
    try:
        etcd.start()
        nats.start()
        began = time.monotonic()
        with served("disagg-cluster", directory / "state", sets=sets, port=port) as graph:
            print(f"ready after {time.monotonic() - began:.1f} s")
            yield graph, etcd, nats
    finally:
        nats.stop()
        etcd.stop()


async def answer(graph: Graph) -> str:
    began = time.monotonic()
    body = await graph.ask(messages=QUESTION, max_tokens=24, temperature=0)
    print(f"answer after {time.monotonic() - began:.2f} s")
    return str(body["choices"][0]["message"]["content"])


async def recovers(graph: Graph, expected: str) -> float:
    """Seconds until the answer is given again; another answer is a failure at once."""
    began = time.monotonic()
    while True:
        try:
            found = await answer(graph)
        except (AssertionError, aiohttp.ClientError, TimeoutError) as e:
            assert time.monotonic() - began < RECOVER_S, f"no answer after {RECOVER_S} s: {e}"
            continue
        assert found == expected
        return time.monotonic() - began


async def test_answers_paris_over_etcd_and_nats_and_survives_a_restart_of_each(
    cluster: tuple[Graph, planes.Plane, planes.Plane],
) -> None:
    graph, etcd, nats = cluster
    first = await answer(graph)
    assert "Paris" in first
    plan = graph.plan()
    assert (plan["discovery"], plan["event_plane"], plan["engine_kind"]) == ("etcd", "nats", "vllm")
    assert await graph.counters("decode-0")  # the engine's own counters: vLLM runs, not the stand-in
    for plane in (nats, etcd):
        plane.stop()
        assert await answer(graph) == first, "known workers are served while the plane is away"
        plane.start()
        print(f"{plane.argv[0].rsplit('/', 1)[-1]} restarted: {await recovers(graph, first):.1f} s")
    assert {p["state"] for p in graph.status()["processes"]} == {"ready"}
