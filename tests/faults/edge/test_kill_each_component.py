"""kill -9 of each component while 20 streams run (P7): every request ends in its whole answer or a clear error within a
deadline, none twice, none hung; with a second replica the death is invisible; afterwards the graph is as before."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from bench.mockgraph import MockGraph, get, wait
from tests.faults.edge.streams import Outcome, stream, summary

STREAMS, TOKENS = 20, 200
DEADLINE_S = 45.0


async def drill(graph: MockGraph, victim: str, after: int = 10) -> tuple[list[Outcome], list[Outcome]]:
    """(streams in flight when the victim was killed, requests sent right after)."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        running = [Outcome() for _ in range(STREAMS)]
        tasks = [
            asyncio.create_task(
                stream(session, graph.gateway, f"{victim} stream {i} about rivers", TOKENS, o, DEADLINE_S)
            )
            for i, o in enumerate(running)
        ]
        await asyncio.wait_for(asyncio.gather(*(o.first.wait() for o in running)), DEADLINE_S)
        assert not any(t.done() for t in tasks), "all streams are in flight when the blow falls"
        graph.kill(victim)
        graph.processes[victim].wait(5)
        later = [await stream(session, graph.gateway, f"{victim} after {i}", 5, None, DEADLINE_S) for i in range(after)]
        await asyncio.gather(*tasks)
    return running, later


async def recovered(graph: MockGraph, victim: str) -> None:
    await asyncio.to_thread(graph.restart, victim)
    await asyncio.to_thread(wait, "health after the restart", lambda: get(graph.gateway + "/health", 10)[0] == 200, 60)
    if victim.startswith("prefill") or victim == "router":
        await asyncio.to_thread(wait, "the router to see both", lambda: graph.router_ready(2), 60)
    async with aiohttp.ClientSession() as session:
        out = [await stream(session, graph.gateway, f"{victim} again {i}", 5) for i in range(4)]
    assert all(o.whole for o in out), summary(out)


@pytest.mark.parametrize("victim", ["router", "prefill-0", "decode-0"])
async def test_a_component_with_a_fallback_dies_unseen(graph: MockGraph, victim: str) -> None:
    """The router costs only the pin; a prefill or decode worker has a second replica."""
    running, later = await drill(graph, victim)
    assert summary(running)["whole"] == STREAMS, summary(running)
    assert summary(later)["whole"] == len(later), summary(later)
    await recovered(graph, victim)


async def test_one_of_two_dynamo_frontends_dies(graph: MockGraph) -> None:
    """Its streams end in a clear error (their state died with it); every later request is served by the other."""
    running, later = await drill(graph, "dynamo-frontend")
    assert not summary(running)["wrong"], summary(running)
    assert 0 < summary(running)["whole"] < STREAMS, "the two replicas shared the streams"
    assert all(o.error.startswith("stream stream_broken") for o in running if not o.whole), summary(running)
    assert summary(later)["whole"] == len(later), summary(later)
    await recovered(graph, "dynamo-frontend")


async def test_the_gateway_dies(graph: MockGraph) -> None:
    """The client's own connection is gone: nothing can tell it more. Workers are freed, and a new gateway serves."""
    running, later = await drill(graph, "gateway", after=2)
    assert not summary(running)["wrong"], summary(running)
    assert all(o.error.startswith("connection") for o in running + later), (summary(running), summary(later))

    def inflight() -> float:
        return sum(graph.worker_metric(w, "dynamo_blob_mock_inflight") for w in ("decode-0", "decode-1"))

    await asyncio.to_thread(wait, "workers without requests", lambda: inflight() == 0, 15)
    await recovered(graph, "gateway")


async def test_both_decode_workers_die(graph: MockGraph) -> None:
    """No replica is left: a clear error for every stream, /health says no, and the graph heals."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        running = [Outcome() for _ in range(STREAMS)]
        tasks = [
            asyncio.create_task(stream(session, graph.gateway, f"both {i}", TOKENS, o, DEADLINE_S))
            for i, o in enumerate(running)
        ]
        await asyncio.wait_for(asyncio.gather(*(o.first.wait() for o in running)), DEADLINE_S)
        graph.kill("decode-0")
        graph.kill("decode-1")
        await asyncio.gather(*tasks)
        later = await stream(session, graph.gateway, "both later", 5, None, DEADLINE_S)
    assert not summary(running)["wrong"] and all(o.error for o in running), summary(running)
    assert later.error.startswith("503 unavailable"), later
    assert (await asyncio.to_thread(get, graph.gateway + "/health", 10))[0] == 503
    assert b'"data": []' in (await asyncio.to_thread(get, graph.gateway + "/v1/models", 10))[1]
    await asyncio.to_thread(graph.restart, "decode-1")
    await recovered(graph, "decode-0")
