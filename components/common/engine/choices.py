"""Several answers to one prompt (`n`) in a decode worker: one pulls the prefill worker's KV, the others wait for it.

vLLM gives every copy of such a request the same handover. The prefill worker frees its blocks when the first copy has
them; a copy that comes later reads, one-sided, what may belong to another request by then: a wrong answer served as
success, the kind of case 30. So only the first copy gets the handover; the others start when it has its first token,
find the prompt's whole blocks in HBM and compute the few tokens after them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any


def without_end(chunk: dict[str, Any], ends: list[dict[str, Any]]) -> dict[str, Any] | None:
    """`chunk` without its end, which goes to `ends`; None when nothing is left. Dynamo (1.6.1) closes the whole answer at
    the first choice that ends, and the longer ones would be cut off."""
    if "finish_reason" not in chunk:
        return chunk
    end: dict[str, Any] = {
        k: chunk.pop(k) for k in ("finish_reason", "completion_usage", "disaggregated_params") if k in chunk
    }
    ends.append({"token_ids": [], "index": chunk["index"], **end})
    return chunk if chunk["token_ids"] else None


def together(ends: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ends, first choice first, each with the usage of all: only the last one to come knew it."""
    usage = ends[-1].get("completion_usage") if ends else None
    return [{**end, "completion_usage": usage} if usage else end for end in sorted(ends, key=lambda e: e["index"])]


def others(request_id: str, n: int) -> list[str]:
    """Request ids of the second to the last answer."""
    return [f"{request_id}-{i}" for i in range(1, n)]


async def generate(
    llm: Any, inputs: Any, params: Any, request_id: str, rest: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    """Outputs of `params.n` requests, each with its choice's `index` set, as they come. `rest`: kv_transfer_params of all
    but the first. Seeds are vLLM's own for several answers: seed + index. Ending the generator ends the requests."""
    came: asyncio.Queue[Any] = asyncio.Queue(maxsize=64)
    pulled = asyncio.Event()

    async def one(index: int, name: str) -> None:
        own = params.clone()
        own.n = 1
        if params.seed is not None:
            own.seed = params.seed + index
        if index:
            own.extra_args = {**(params.extra_args or {}), "kv_transfer_params": rest}
            await pulled.wait()
        try:
            async for output in llm.generate(inputs, own, name):
                for choice in output.outputs:
                    choice.index = index
                pulled.set()
                await came.put(output)
        finally:
            pulled.set()  # also when the first one failed: its error ends the others

    tasks = [asyncio.create_task(one(i, name)) for i, name in enumerate([request_id, *others(request_id, params.n)])]

    async def all_of_them() -> None:
        try:
            await asyncio.gather(*tasks)
        finally:
            await came.put(None)

    whole = asyncio.create_task(all_of_them())
    try:
        while (output := await came.get()) is not None:
            yield output
        await whole  # raises what one of them raised
    finally:
        for task in (whole, *tasks):
            task.cancel()
        await asyncio.gather(whole, *tasks, return_exceptions=True)
