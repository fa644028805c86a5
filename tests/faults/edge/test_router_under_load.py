"""The router killed and restarted under load: no request fails, pins stop and resume. And 200 streams at once."""

from __future__ import annotations

import asyncio

import aiohttp

from bench.mockgraph import MockGraph, get, wait
from tests.faults.edge.streams import Outcome, stream, summary


def pinned(graph: MockGraph, pin: str = "pinned") -> float:
    text = get(graph.gateway + "/metrics")[1].decode()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("dynamo_blob_gateway_pins_total{") and f'"{pin}"' in line
    )


async def test_no_request_fails_and_pins_resume(graph: MockGraph) -> None:
    outcomes: list[Outcome] = []
    stop = asyncio.Event()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client(k: int) -> None:
            n = 0
            while not stop.is_set():
                outcomes.append(await stream(session, graph.gateway, f"load {k} {n}", 4))
                n += 1

        clients = [asyncio.create_task(client(k)) for k in range(8)]
        for _ in range(2):
            before = await asyncio.to_thread(pinned, graph)
            await asyncio.to_thread(wait, "pinned requests", lambda b=before: pinned(graph) > b + 8, 30)  # type: ignore[misc]
            away = await asyncio.to_thread(pinned, graph, "no-router")
            graph.kill("router")
            await asyncio.to_thread(
                wait, "requests without a router", lambda a=away: pinned(graph, "no-router") > a + 8, 30
            )  # type: ignore[misc]
            await asyncio.to_thread(graph.restart, "router")
            await asyncio.to_thread(wait, "the router", lambda: graph.router_ready(2), 60)
            before = await asyncio.to_thread(pinned, graph)
            await asyncio.to_thread(wait, "pins to resume", lambda b=before: pinned(graph) > b + 8, 30)  # type: ignore[misc]
        stop.set()
        await asyncio.gather(*clients)
    assert len(outcomes) > 40 and all(o.whole for o in outcomes), summary(outcomes)


async def test_200_streams_at_once(graph: MockGraph) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        outcomes = [Outcome() for _ in range(200)]
        tasks = [
            asyncio.create_task(stream(session, graph.gateway, f"one of 200: {i}", 30, o, 120))
            for i, o in enumerate(outcomes)
        ]
        await asyncio.gather(*tasks)
    assert all(o.whole for o in outcomes), summary(outcomes)
    text = get(graph.gateway + "/metrics")[1].decode()
    assert "dynamo_blob_gateway_inflight 0.0" in text
