"""The main job on real parts: SmolLM2 from Blob, prefill and decode apart, an OpenAI client in front.

One float32 graph serves the whole module, so that prefill/decode can be compared with the aggregated
graph token for token; the default bf16 graph is asked by test_smoke.
"""

from __future__ import annotations

import asyncio
import random
import shutil

import aiohttp
import pytest

from tests.e2e.graph import ROOT, Graph, served, short_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FLOAT32 = ("engine.set.dtype=float32",)
PROMPT_TOKENS = (300, 600, 900, 1200, 1600, 2000)


@pytest.fixture(scope="module")
def state():
    directory = short_directory()
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def graph(state):
    with served("disagg", state, sets=FLOAT32) as g:
        yield g


def content(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


async def test_a_question_with_a_known_answer(graph: Graph):
    answer = await graph.ask(
        messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=24, temperature=0
    )
    assert "Paris" in content(answer)
    assert answer["usage"]["completion_tokens"] > 0


async def test_a_random_word_comes_back(graph: Graph):
    word = random.choice(["lantern", "copper", "meadow", "violin", "harbor", "pepper", "marble", "falcon"])
    answer = await graph.ask(
        messages=[{"role": "user", "content": f"Repeat this word and nothing else: {word}"}],
        max_tokens=12,
        temperature=0,
    )
    assert word in content(answer).lower()


async def test_a_stream_says_what_a_whole_answer_says(graph: Graph):
    body = {"messages": [{"role": "user", "content": "Name three colors."}], "max_tokens": 24, "temperature": 0}
    whole = await graph.ask(**body)
    chunks = await graph.stream(**body, stream_options={"include_usage": True})
    deltas = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert "".join(deltas) == content(whole)
    assert sum(1 for d in deltas if d) > 3, "it arrives in pieces"
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_a_client_that_leaves_frees_the_worker(graph: Graph):
    before = await graph.counters("decode-0")
    body = {
        "model": graph.model, "stream": True, "max_tokens": 1500, "temperature": 0, "ignore_eos": True,
        "messages": [{"role": "user", "content": "Count from one to a thousand."}],
    }  # fmt: skip
    async with aiohttp.ClientSession() as http, http.post(graph.url + "/v1/chat/completions", json=body) as r:
        assert r.status == 200, await r.text()
        for _ in range(6):
            await r.content.readline()
    deadline = asyncio.get_running_loop().time() + 20
    while (now := await graph.counters("decode-0"))["vllm:num_requests_running"] > 0:
        assert asyncio.get_running_loop().time() < deadline, "the decode worker still generates for nobody"
        await asyncio.sleep(0.2)
    assert 0 < now["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 1500


async def test_decode_pulled_the_kv_and_computed_no_prompt(graph: Graph):
    """vLLM's own counters: bytes came over NIXL, and at most one prompt token a request was computed by decode."""
    before = await graph.counters("decode-0")
    prompt = text(400, seed=77)
    await graph.ask("/v1/completions", prompt=prompt, max_tokens=4, temperature=0)
    after = await graph.counters("decode-0")
    gained = {k: after[k] - before.get(k, 0) for k in after}
    assert gained["vllm:nixl_bytes_transferred_sum"] > 0
    assert gained["vllm:prompt_tokens_by_source_total:external_kv_transfer"] >= 300
    requests = gained["vllm:request_success_total"]  # the gateway's canaries of one token finish in between too
    assert gained.get("vllm:prompt_tokens_by_source_total:local_compute", 0) <= requests
    told = graph.status()["prompt_tokens"]  # what `dynamo status` shows is the workers' own count
    assert told["decode-0"]["external_kv_transfer"] >= after["vllm:prompt_tokens_by_source_total:external_kv_transfer"]
    assert told["prefill-0"]["local_compute"] >= 300 > told["prefill-0"]["external_kv_transfer"] == 0


async def test_several_answers_are_whole_and_pull_the_kv_once(graph: Graph):
    """Kind of case 30: a second copy of a request must not read blocks that the first one's arrival freed."""
    body = {"prompt": text(400, seed=78), "max_tokens": 20, "temperature": 0.0001, "ignore_eos": True}
    alone = (await graph.ask("/v1/completions", **body))["choices"][0]["text"]
    before = await graph.counters("decode-0")
    answer = await graph.ask("/v1/completions", **body, n=3)
    after = await graph.counters("decode-0")
    assert [c["text"] for c in sorted(answer["choices"], key=lambda c: c["index"])] == [alone] * 3
    assert answer["usage"]["completion_tokens"] == 60
    pulls = after["vllm:nixl_bytes_transferred_count"] - before["vllm:nixl_bytes_transferred_count"]
    canaries = after["vllm:request_success_total"] - before["vllm:request_success_total"] - 3
    assert 1 <= pulls <= 1 + canaries


def text(tokens: int, seed: int) -> str:
    """About `tokens` tokens of natural English (the licence text, from a random place)."""
    words = (ROOT / "LICENSE").read_text().split()
    start = random.Random(seed).randrange(0, 300)
    return " ".join((words + words)[start : start + int(tokens / 1.45)])


async def greedy(graph: Graph, prompt: str) -> list[str]:
    answer = await graph.ask("/v1/completions", prompt=prompt, max_tokens=24, temperature=0, logprobs=1)
    return answer["choices"][0]["logprobs"]["tokens"]


async def test_prefill_decode_answers_what_the_aggregated_graph_answers(graph: Graph, state):
    """Float32, greedy, natural text: token for token. The control changes one word and must differ."""
    prompts = [text(n, seed=n) for n in PROMPT_TOKENS]
    apart = [await greedy(graph, p) for p in prompts]
    with served("aggregated", state / "a", sets=FLOAT32, port=int(graph.url.rsplit(":", 1)[1]) + 100) as together:
        same = [await greedy(together, p) for p in prompts]
        control = await greedy(together, prompts[0].rsplit(" ", 1)[0] + " banana")
    assert [len(t) for t in apart] == [24] * len(prompts)
    assert apart == same
    assert control != apart[0]
