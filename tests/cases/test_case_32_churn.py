"""Case 32 (dynamo#13088): requests hang while workers come and go. Kill and restart in a loop; every request ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from bench.mockgraph import MockGraph, get, wait
from tests.faults.edge.streams import Outcome, stream, summary

CLIENTS = 16


def back(graph: MockGraph, name: str) -> bool:
    """The new process is there and the old one's entry is gone from discovery."""
    if name == "router":
        return graph.router_ready(2)
    pool = graph.router_status().get("pools", {}).get("prefill" if name.startswith("prefill") else "backend", {})
    return len(pool.get("workers", ())) == 2 and get(f"http://127.0.0.1:{graph.system_ports[name]}/health")[0] == 200


@pytest.mark.slow
async def test_every_request_ends(tmp_path: Path) -> None:
    graph = await asyncio.to_thread(MockGraph(tmp_path, prefill=2, decode=2, token_ms=10.0).__enter__)
    outcomes: list[Outcome] = []
    stop = asyncio.Event()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def client(k: int) -> None:
                n = 0
                while not stop.is_set():
                    outcomes.append(await stream(session, graph.gateway, f"client {k} request {n} " * 8, 20, None, 60))
                    n += 1

            clients = [asyncio.create_task(client(k)) for k in range(CLIENTS)]
            for victim in ("prefill-0", "decode-0", "router", "prefill-1"):
                target = len(outcomes) + CLIENTS
                await asyncio.to_thread(wait, "answers", lambda t=target: len(outcomes) >= t, 60)  # type: ignore[misc]
                graph.kill(victim)
                await asyncio.to_thread(graph.restart, victim)
                await asyncio.to_thread(wait, f"{victim} to be back", lambda v=victim: back(graph, v), 60)  # type: ignore[misc]
            target = len(outcomes) + 2 * CLIENTS
            await asyncio.to_thread(wait, "answers", lambda: len(outcomes) >= target, 60)
            stop.set()
            await asyncio.gather(*clients)
    finally:
        await asyncio.to_thread(graph.__exit__, None, None, None)
    found = summary(outcomes)
    assert not found["wrong"], found
    assert found["whole"] >= 0.95 * len(outcomes), found
    assert all(o.whole for o in outcomes[-CLIENTS:]), "whole again after the last blow"
