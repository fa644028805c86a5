"""Case 31 (dynamo#9344, #4917, #7319): a prefill worker gets SIGTERM during prefill. No request may fail."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp

from bench.mockgraph import MockGraph, wait
from tests.faults.edge.streams import Outcome, stream, summary


async def test_zero_failed_requests(tmp_path: Path) -> None:
    graph = await asyncio.to_thread(
        MockGraph(tmp_path, prefill=2, decode=1, token_ms=2.0, prefill_tokens_per_s=1500.0).__enter__
    )
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            outcomes = [
                Outcome() for _ in range(12)
            ]  # about 200 tokens each: 0.13 s of prefill apiece, one at a time per worker
            tasks = [
                asyncio.create_task(stream(session, graph.gateway, f"{i} " + f"river stone {i} " * 45, 10, o, 60))
                for i, o in enumerate(outcomes)
            ]

            def prefilling() -> bool:
                return graph.worker_metric("prefill-0", "dynamo_blob_mock_inflight") >= 2

            await asyncio.to_thread(wait, "prefill-0 at work", prefilling, 20, 0.01)
            graph.kill("prefill-0", signal.SIGTERM)
            more = [await stream(session, graph.gateway, f"later {i} " * 20, 5) for i in range(6)]
            await asyncio.gather(*tasks)
        assert all(o.whole for o in outcomes + more), summary(outcomes + more)
        assert await asyncio.to_thread(graph.processes["prefill-0"].wait, 20) is not None
    finally:
        await asyncio.to_thread(graph.__exit__, None, None, None)
