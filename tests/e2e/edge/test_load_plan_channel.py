"""The router's load plan reaches the engine of every worker that serves, and only the router's does."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from bench.mockgraph import SERVED, MockGraph, free_ports, get, wait
from tests.unit.gateway.stub import FakeRouter

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def plans(graph: MockGraph) -> dict[str, float]:
    return {w: graph.worker_metric(w, "dynamo_blob_mock_load_plans_total") for w in WORKERS}


def healthy(url: str) -> bytes:
    status, body = get(url + "/health")
    return body if status == 200 else b""


def ask(url: str, headers: dict[str, str] | None = None) -> None:
    body = json.dumps(
        {"model": SERVED, "messages": [{"role": "user", "content": "load plan"}], "max_tokens": 2}
    ).encode()
    request = urllib.request.Request(
        url + "/v1/chat/completions", body, {"content-type": "application/json"} | (headers or {})
    )
    assert urllib.request.urlopen(request, timeout=20).status == 200


async def test_it_reaches_prefill_and_decode(graph: MockGraph, tmp_path: Path) -> None:
    import asyncio

    router = FakeRouter(tmp_path / "r.sock")
    router.decision = {
        "prefill": graph.router_status()["pools"]["prefill"]["workers"][0],
        "max_load_tokens": 4096,
        "kv_load_tiers": [{"tier": "blob"}],
    }
    await router.start()
    port = free_ports(40)[-1]
    await asyncio.to_thread(
        graph.start_gateway,
        "gateway-planned",
        listen=f"127.0.0.1:{port}",
        router=f"unix:{router.path}",
        router_deadline_ms=2000,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await asyncio.to_thread(wait, "gateway and router", lambda: b'"router": "connected"' in healthy(url))
        before = await asyncio.to_thread(plans, graph)
        await asyncio.to_thread(ask, url)
        after = await asyncio.to_thread(plans, graph)
        grown = [w for w in WORKERS if after[w] > before[w]]
        assert {w.split("-")[0] for w in grown} == {"prefill", "decode"}, (before, after, router.messages)
        for w in grown:
            assert await asyncio.to_thread(graph.worker_metric, w, "dynamo_blob_mock_load_plan_tokens") == 4096
    finally:
        graph.processes.pop("gateway-planned").kill()


def test_a_client_cannot_send_one(graph: MockGraph) -> None:
    before = plans(graph)
    ask(graph.gateway, {"x-dynamo-meta-load-plan": '{"max_load_tokens":1}'})
    assert plans(graph) == before
    ask(
        graph.frontend, {"x-dynamo-meta-load-plan": '{"max_load_tokens":1}'}
    )  # negative control: past the gateway it would count
    assert plans(graph) != before
