"""Case 42 on real parts: what the index says about a prompt equals what the workers hold, block for block, salt for salt."""

from __future__ import annotations

import json
import random
import urllib.request
from typing import Any

from bench.mockgraph import SERVED, MockGraph, wait
from tests.e2e.edge.test_openai_client import record


def ask(graph: MockGraph, prompt: list[int], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the answer, the gateway's record)."""
    body = {"model": SERVED, "prompt": prompt, "max_tokens": 1} | more
    request = urllib.request.Request(
        graph.gateway + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as r:
        return json.loads(r.read()), record(graph, r.headers["x-request-id"])


def predicted_equals_served(graph: MockGraph, prompt: list[int], at_least: int = 0, **more: Any) -> int:
    """The hit in blocks, predicted and served alike. Earlier requests' events may still be on their way (then nothing
    is predicted, and a worker that has nothing agrees): asked again until the hit is `at_least` as long."""

    def settled() -> tuple[int, int] | None:
        answer, found = ask(graph, prompt, **more)
        served = answer["usage"]["prompt_tokens_details"]["cached_tokens"] // graph.block_size
        assert found["named"] == found["served_prefill"]
        return (found["overlap_blocks"], served) if found["overlap_blocks"] == served >= at_least else None

    return int(wait("index and worker to agree", settled, 10)[0])


def test_audit_of_random_prefixes(graph: MockGraph) -> None:
    rng = random.Random(42)
    base = [rng.randrange(100, 40000) for _ in range(640)]
    assert ask(graph, base)[1]["overlap_blocks"] == 0
    for cut in (16, 160, 320, 633):
        tail = [rng.randrange(100, 40000) for _ in range(40)]
        predicted_equals_served(graph, base[:cut] + tail, cut // 16)
    assert predicted_equals_served(graph, [7, *base[1:]]) < 40, (
        "negative control: another first token shares nothing at first"
    )


def test_salted_prompts_are_indexed_under_their_salt(graph: MockGraph) -> None:
    rng = random.Random(24)
    prompt = [rng.randrange(100, 40000) for _ in range(200)]
    answer, found = ask(graph, prompt, cache_salt="one")
    assert (found["overlap_blocks"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (0, 0)
    answer, found = ask(graph, prompt, cache_salt="two")
    assert (found["overlap_blocks"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (0, 0), (
        "another salt hits nothing"
    )
    answer, found = ask(graph, prompt)
    assert (found["overlap_blocks"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (0, 0), (
        "no salt hits nothing"
    )
    assert predicted_equals_served(graph, prompt, 12, cache_salt="one") == 12


def test_the_mismatch_gauge_stays_low_on_a_true_index(graph: MockGraph) -> None:
    from bench.mockgraph import get

    rng = random.Random(7)
    prompt = [rng.randrange(100, 40000) for _ in range(300)]
    for _ in range(20):
        predicted_equals_served(graph, prompt)
    text = get(f"http://127.0.0.1:{graph.router_http}/metrics")[1].decode()
    ratio = next(
        float(x.split()[1]) for x in text.splitlines() if x.startswith("dynamo_blob_router_index_mismatch_ratio ")
    )
    assert ratio < 0.2
