"""Memory of gateway, router, frontend and workers over 20,000 requests with aborts: it must be flat after the warm-up.

Requests mix chat and completions, plain and streamed, new and repeated prompts; 10 % are broken off by the client
at a random moment. The row to look at is `growth`: MiB from a quarter of the run to its end, per 10,000 requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.mockgraph import SERVED, MockGraph, get, wait
from bench.report import Report

CLIENTS = 16
ABORTS = 0.1


def bench(report: Report, quick: bool) -> None:
    total = 4000 if quick else 20000
    with (
        tempfile.TemporaryDirectory(prefix="dynamo-blob-soak-") as scratch,
        MockGraph(Path(scratch), prefill=2, decode=2, kv_cache_bytes=2048 * 16 * 1024) as graph,
    ):
        samples, outcomes = asyncio.run(soak(graph, total, seed=report.seed))
        left = leftovers(graph)
    for done, rss in samples:
        for name, value in rss.items():
            report.add(f"after {done}", name, 0, value, "MiB")
    for name, value in growth(samples).items():
        report.add("growth", name, 0, value, "MiB per 10,000 requests")
    report.note(f"outcomes {dict(outcomes)}; left behind {left}")
    if outcomes["bad"] or any(left.values()):
        raise RuntimeError(f"not clean: {dict(outcomes)}, {left}")


async def soak(
    graph: MockGraph, total: int, seed: int = 0, steps: int = 20
) -> tuple[list[tuple[int, dict[str, float]]], Counter[str]]:
    """([(requests done, {process: RSS in MiB})], outcomes: ok, aborted, bad)."""
    rng, outcomes = random.Random(seed), Counter[str]()
    samples: list[tuple[int, dict[str, float]]] = []
    numbers = iter(range(total))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            for n in numbers:
                outcomes[await one(session, graph, rng, n)] += 1
                if n % max(1, total // steps) == 0:
                    samples.append((n, rss(graph)))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    samples.append((total, rss(graph)))
    return sorted(samples, key=lambda s: s[0]), outcomes


async def one(session: aiohttp.ClientSession, graph: MockGraph, rng: random.Random, n: int) -> str:
    prompt = f"{n if rng.random() < 0.5 else n % 50} " + "the river and the stone " * rng.randrange(1, 40)
    stream = rng.random() < 0.6
    body: dict[str, Any] = {"model": SERVED, "max_tokens": rng.randrange(1, 12), "stream": stream}
    chat = rng.random() < 0.7
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    abort_after = rng.random() * 0.02 if rng.random() < ABORTS else None
    try:
        async with asyncio.timeout(abort_after or 60):
            async with session.post(
                graph.gateway + ("/v1/chat/completions" if chat else "/v1/completions"), json=body
            ) as r:
                text = await r.read()
                return "ok" if r.status == 200 and (not stream or text.rstrip().endswith(b"[DONE]")) else "bad"
    except TimeoutError:
        return "aborted" if abort_after else "bad"


def rss(graph: MockGraph) -> dict[str, float]:
    out = {}
    for name, process in graph.processes.items():
        if process.poll() is None:
            out[name] = psutil.Process(process.pid).memory_info().rss / 2**20
    return out


def growth(samples: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """MiB per 10,000 requests between a quarter of the run and its end."""
    start, end = samples[len(samples) // 4], samples[-1]
    return {name: (end[1][name] - start[1][name]) / (end[0] - start[0]) * 1e4 for name in end[1] if name in start[1]}


def leftovers(graph: MockGraph) -> dict[str, float]:
    """What must be zero once all requests are over."""

    def look() -> dict[str, float]:
        text = get(graph.gateway + "/metrics")[1].decode()
        inflight = next(
            float(line.split()[1]) for line in text.splitlines() if line.startswith("dynamo_blob_gateway_inflight ")
        )
        workers = sum(graph.worker_metric(name, "dynamo_blob_mock_inflight") for name in graph.system_ports)
        return {
            "gateway in flight": inflight,
            "workers in flight": workers,
            "bookings": float(graph.router_status()["bookings"]),
        }

    with contextlib.suppress(TimeoutError):  # the caller sees what is left
        wait("everything to be over", lambda: not any(look().values()), 30)
    return look()
