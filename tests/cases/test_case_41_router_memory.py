"""Case 41 (dynamo#4429, #10729, #11933): the router's memory grows without end. Many more prefixes than the workers'
caches hold; blocks that were evicted must leave the index, too."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

import aiohttp
import psutil
import pytest

from bench.mockgraph import SERVED, MockGraph, get

PREFIXES = int(os.environ.get("DYNAMO_BLOB_CASE_41_PREFIXES", "2000"))
"""Prompts of 8 to 16 blocks each: some 24,000 distinct blocks through caches of 2 x 512. `dynamo bench soak` goes further."""


@pytest.mark.slow
async def test_rss_and_index_reach_a_plateau(tmp_path: Path) -> None:
    graph = MockGraph(tmp_path, prefill=2, decode=1, kv_cache_bytes=512 * 16 * 1024, gateway={"trace_share": 0.0})
    await asyncio.to_thread(graph.__enter__)
    try:
        process = psutil.Process(graph.processes["router"].pid)
        rng = random.Random(41)
        rss: list[int] = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(n: int) -> None:
                prompt = [rng.randrange(100, 40000) for _ in range(rng.randrange(128, 256))]
                async with session.post(
                    graph.gateway + "/v1/completions", json={"model": SERVED, "prompt": prompt, "max_tokens": 1}
                ) as r:
                    await r.read()
                    assert r.status == 200

            for start in range(0, PREFIXES, PREFIXES // 8):
                queue = iter(range(start, start + PREFIXES // 8))

                async def client(numbers: object = queue) -> None:
                    for n in numbers:  # type: ignore[attr-defined]
                        await one(n)

                await asyncio.gather(*(client() for _ in range(8)))
                rss.append(process.memory_info().rss)
        status = await asyncio.to_thread(graph.router_status)
        held = sum([graph.worker_metric(w, "dynamo_blob_mock_cached_blocks") for w in ("prefill-0", "prefill-1")])
        indexed = sum(json.loads(get(f"http://127.0.0.1:{graph.router_http}/audit")[1])["prefill"].values())
        assert held == 1024, "the caches are full"
        assert indexed <= 1.2 * held, (indexed, held)
        for _ in range(100):  # the last notes go to the router in company
            if not status["bookings"]:
                break
            await asyncio.sleep(0.1)
            status = await asyncio.to_thread(graph.router_status)
        assert status["bookings"] == 0
        assert rss[-1] - rss[3] < 8 * 2**20, [r // 2**20 for r in rss]
    finally:
        await asyncio.to_thread(graph.__exit__, None, None, None)
