"""`n` answers in a decode worker: one handover is pulled once; the other answers start when it is there (kind of case 30)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from components.common.engine import choices
from components.common.engine.config import WorkerConfig
from components.common.engine.mock import MockEngine, answer_ids

HANDOVER = {"do_remote_prefill": True, "remote_engine_id": "p", "tenant": "0" * 32}
REST = {"tenant": "0" * 32}
MOCK = {
    "name": "decode-0", "role": "aggregated", "served_model": "mock", "namespace": "n", "component": "backend", "run_dir": "/r", "engine_kind": "mock",
    "weights": {"release": {"model": "m"}, "account": {"url": "http://127.0.0.1:1/a", "credential": {"kind": "entra"}}, "root": "/r", "trust": {"require": "none"}},
}  # fmt: skip


class Params(SimpleNamespace):
    def clone(self) -> Params:
        return Params(**vars(self))


class Llm:
    """Records what it was asked; answers three times per request."""

    def __init__(self, fail: str = "", hang: str = "") -> None:
        self.asked: dict[str, Any] = {}
        self.order: list[str] = []
        self.ended: list[str] = []
        self.fail, self.hang = fail, hang

    async def generate(self, inputs: Any, params: Any, name: str) -> Any:
        self.asked[name] = params
        self.order.append(f"ask {name}")
        try:
            for i in range(3):
                await asyncio.sleep(0)
                if name == self.fail:
                    raise ValueError("broken")
                if name == self.hang and i == 1:
                    await asyncio.Event().wait()
                self.order.append(f"out {name}")
                yield SimpleNamespace(outputs=[SimpleNamespace(index=0, token_ids=list(range(i + 1)))])
        finally:
            self.ended.append(name)


def params(n: int = 3, seed: int | None = 7) -> Params:
    return Params(n=n, seed=seed, extra_args={"kv_transfer_params": HANDOVER})


async def test_only_the_first_pulls_and_the_others_wait_for_it() -> None:
    llm, seen = Llm(), []
    async for output in choices.generate(llm, "prompt", params(), "r", REST):
        seen += [(c.index, len(c.token_ids)) for c in output.outputs]
    assert sorted(seen) == [(i, k) for i in range(3) for k in (1, 2, 3)]
    given = {name: p.extra_args["kv_transfer_params"] for name, p in llm.asked.items()}
    assert given == {"r": HANDOVER, "r-1": REST, "r-2": REST}
    assert {name: (p.n, p.seed) for name, p in llm.asked.items()} == {"r": (1, 7), "r-1": (1, 8), "r-2": (1, 9)}
    assert llm.order.index("out r") < llm.order.index("ask r-1")


async def test_an_error_ends_all_and_is_raised() -> None:
    for name in ("r", "r-2"):
        llm = Llm(fail=name)
        with pytest.raises(ValueError, match="broken"):
            async for _ in choices.generate(llm, "prompt", params(), "r", REST):
                pass
        assert sorted(llm.ended) == sorted(llm.asked)


async def test_ending_the_stream_ends_every_request() -> None:
    llm = Llm(hang="r-1")
    outputs = choices.generate(llm, "prompt", params(), "r", REST)
    async for output in outputs:
        if output.outputs[0].index == 1:
            break
    await asyncio.wait_for(outputs.aclose(), 5)
    assert sorted(llm.ended) == sorted(llm.asked) == ["r", "r-1", "r-2"]


def test_ends_come_last_and_together() -> None:
    """Dynamo closes an answer at the first choice that ends; the longer ones must be whole by then."""
    ends: list[dict[str, Any]] = []
    out = []
    for chunk in (
        {"token_ids": [1], "index": 1, "finish_reason": "stop", "completion_usage": {"completion_tokens": 2}},
        {"token_ids": [5], "index": 0},
        {"token_ids": [], "index": 0, "finish_reason": "length", "completion_usage": {"completion_tokens": 3}},
    ):
        left = choices.without_end(dict(chunk), ends)
        out += [left] if left else []
    assert out == [{"token_ids": [1], "index": 1}, {"token_ids": [5], "index": 0}]
    usage = {"completion_tokens": 3}
    assert choices.together(ends) == [
        {"token_ids": [], "index": 0, "finish_reason": "length", "completion_usage": usage},
        {"token_ids": [], "index": 1, "finish_reason": "stop", "completion_usage": usage},
    ]
    assert choices.together([]) == []


@pytest.mark.parametrize("n", [1, 3])
async def test_the_mock_ends_every_answer_only_when_all_are_whole(n: int) -> None:
    """Its second and third answer were torn: Dynamo closes at the first choice that ends."""
    engine = MockEngine(WorkerConfig.model_validate(MOCK), model_path="unused")
    engine.words = list(range(1000))
    request = {"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": 5}, "sampling_options": {"n": n}}
    context = SimpleNamespace(metadata={}, is_stopped=lambda: False)
    chunks = [c async for c in engine.generate(request, context)]
    first_end = next(i for i, c in enumerate(chunks) if "finish_reason" in c)
    answers: dict[int, list[int]] = {i: [] for i in range(n)}
    for chunk in chunks if n == 1 else chunks[:first_end]:
        answers[chunk["index"]] += chunk["token_ids"]
    assert answers == {i: answer_ids(engine.words, 3, 5) for i in range(n)}
    assert [c["index"] for c in chunks[first_end:]] == list(range(n))
    assert {c["finish_reason"] for c in chunks[first_end:]} == {"length"}
    assert {c["completion_usage"]["completion_tokens"] for c in chunks[first_end:]} == {5 * n}


async def test_the_mock_hands_one_prompt_over_once() -> None:
    """However many answers decode makes of it: Dynamo takes the handover from the first chunk."""
    engine = MockEngine(WorkerConfig.model_validate({**MOCK, "role": "prefill"}), model_path="unused")
    engine.words = list(range(1000))
    request = {"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": 5}, "sampling_options": {"n": 3}}
    context = SimpleNamespace(metadata={}, is_stopped=lambda: False)
    chunks = [c async for c in engine.generate(request, context)]
    assert [c["index"] for c in chunks] == [0] and "disaggregated_params" in chunks[0]
