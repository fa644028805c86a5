"""The official `openai` client, unchanged, against the gateway of the mock graph: right values, not only no error."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tokenizers

from bench.mockgraph import MODEL, SERVED, MockGraph, wait
from components.common.engine.mock import answer_ids, words

CHAT = [{"role": "user", "content": "Tell me about rivers, please."}]


@pytest.fixture(scope="module")
def client(graph: MockGraph) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=graph.gateway + "/v1", api_key="any", max_retries=0, timeout=30) as c:
        yield c


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def expected(tokenizer: tokenizers.Tokenizer) -> Any:
    """The mock's answer: `expected(prompt tokens, n)`."""
    vocabulary = words(MODEL / "tokenizer.json")
    return lambda prompt, n: tokenizer.decode(answer_ids(vocabulary, prompt, n))


def record(graph: MockGraph, request_id: str) -> dict[str, Any]:
    def read() -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(f"{graph.gateway}/debug/decisions/{request_id}", timeout=5) as r:
                return dict(json.loads(r.read()))
        except urllib.error.HTTPError:
            return None

    return dict(wait("the record", read, 5))


def test_chat_and_usage_with_cached_tokens(client: openai.OpenAI, graph: MockGraph, expected: Any) -> None:
    prompt = [{"role": "user", "content": "cached tokens " * 40}]
    first = client.chat.completions.create(model=SERVED, messages=prompt, max_tokens=6)  # type: ignore[arg-type]
    assert first.usage and first.choices[0].message.content == expected(first.usage.prompt_tokens, 6)
    assert (first.usage.completion_tokens, first.choices[0].finish_reason) == (6, "length")
    again = client.chat.completions.create(model=SERVED, messages=prompt, max_tokens=6)  # type: ignore[arg-type]
    assert again.usage and again.usage.prompt_tokens_details
    whole_blocks = again.usage.prompt_tokens // graph.block_size * graph.block_size
    assert again.usage.prompt_tokens_details.cached_tokens == min(whole_blocks, again.usage.prompt_tokens - 1)


def test_the_worker_that_served_is_the_one_the_router_named(client: openai.OpenAI, graph: MockGraph) -> None:
    workers = graph.router_status()["pools"]
    for _ in range(4):
        raw = client.chat.completions.with_raw_response.create(model=SERVED, messages=CHAT, max_tokens=2)  # type: ignore[arg-type]
        found = record(graph, raw.headers["x-request-id"])
        assert found["named"] == found["served_prefill"] in workers["prefill"]["workers"]
        assert found["served_decode"] in workers["backend"]["workers"]
        assert raw.parse().id == f"chatcmpl-{raw.headers['x-request-id']}"


def test_streaming(client: openai.OpenAI, expected: Any) -> None:
    stream = client.chat.completions.create(
        model=SERVED, messages=CHAT, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    chunks = list(stream)
    usage = chunks[-1].usage
    assert usage.completion_tokens == 40 and not chunks[-1].choices
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected(usage.prompt_tokens, 40)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_completions_plain_and_streamed(client: openai.OpenAI, expected: Any) -> None:
    found = client.completions.create(model=SERVED, prompt="Once upon a time", max_tokens=5)
    assert found.usage and found.choices[0].text == expected(found.usage.prompt_tokens, 5)
    streamed = client.completions.create(model=SERVED, prompt="Once upon a time", max_tokens=5, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == found.choices[0].text


def test_stop_ends_before_the_word(client: openai.OpenAI, expected: Any) -> None:
    whole = client.chat.completions.create(model=SERVED, messages=CHAT, max_tokens=8)  # type: ignore[arg-type]
    text = whole.choices[0].message.content or ""
    word = text.split()[3]
    found = client.chat.completions.create(model=SERVED, messages=CHAT, max_tokens=8, stop=[word])  # type: ignore[arg-type]
    assert found.choices[0].finish_reason == "stop"
    assert found.choices[0].message.content == text[: text.index(word)]


def test_seed_is_accepted_and_repeats(client: openai.OpenAI) -> None:
    texts = {
        client.chat.completions.create(model=SERVED, messages=CHAT, max_tokens=4, seed=7).choices[0].message.content
        for _ in range(2)
    }  # type: ignore[arg-type]
    assert len(texts) == 1


def test_logprobs(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model=SERVED, messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2)  # type: ignore[arg-type]
    content = found.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content and len(content) == 3 and all(len(c.top_logprobs) == 2 for c in content)
    assert "".join(c.token for c in content) == found.choices[0].message.content


def test_n(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model=SERVED, messages=CHAT, max_tokens=5, n=3)  # type: ignore[arg-type]
    assert [c.index for c in found.choices] == [0, 1, 2]
    assert (
        found.choices[0].finish_reason == "length"
    )  # Dynamo 1.6.1 closes here: the others' are null, with every engine
    assert [len((c.message.content or "").split()) for c in found.choices] == [5] * 3
    assert found.usage and found.usage.completion_tokens == 15


def test_tools_are_passed_and_counted(client: openai.OpenAI, graph: MockGraph) -> None:
    """The sample model cannot call tools; the request is served, and its template ignores them (test_template_parity has one that does not)."""
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
    raw = client.chat.completions.with_raw_response.create(model=SERVED, messages=CHAT, tools=[tool], max_tokens=3)  # type: ignore[arg-type,list-item]
    found = record(graph, raw.headers["x-request-id"])
    assert raw.parse().choices and (found["named"] is None or found["named"] == found["served_prefill"])


def test_models(client: openai.OpenAI) -> None:
    found = client.models.list().data
    assert [(m.id, m.model_extra["engine"]) for m in found] == [(SERVED, "mock")], "a mock never calls itself real"  # type: ignore[index]
    assert client.models.retrieve(SERVED).id == SERVED


def test_errors_are_the_clients_own_classes(client: openai.OpenAI, graph: MockGraph) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="nope", messages=CHAT)  # type: ignore[arg-type]
    assert not_found.value.code == "model_not_found" and not_found.value.request_id
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=SERVED, messages=[{"role": "user", "content": "one two " * 4000}])
    assert str(graph.max_model_len) in str(too_long.value) and too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=SERVED, messages=CHAT, temperature=9)  # type: ignore[arg-type]


async def test_cancel_frees_the_worker(graph: MockGraph) -> None:
    def inflight() -> float:
        return sum(graph.worker_metric(w, "dynamo_blob_mock_inflight") for w in ("decode-0", "decode-1"))

    def cancelled() -> float:
        return sum(graph.worker_metric(w, "dynamo_blob_mock_cancelled_total") for w in ("decode-0", "decode-1"))

    before = cancelled()
    async with openai.AsyncOpenAI(base_url=graph.gateway + "/v1", api_key="any", max_retries=0) as client:
        stream = await client.chat.completions.create(model=SERVED, messages=CHAT, max_tokens=3000, stream=True)  # type: ignore[call-overload]
        async for _ in stream:
            break
        assert await asyncio.to_thread(inflight) == 1
        await stream.close()
    await asyncio.to_thread(wait, "the worker to be free", lambda: inflight() == 0 and cancelled() > before, 20)
    assert cancelled() == before + 1
