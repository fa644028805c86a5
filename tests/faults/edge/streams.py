"""Streams against the mock graph, and what became of each: whole, a clear error, or something a client must not see."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import aiohttp
import tokenizers

from bench.mockgraph import MODEL, SERVED
from components.common.engine.mock import answer_ids, words
from components.frontend.prompt import Renderer


@cache
def vocabulary() -> tuple[tokenizers.Tokenizer, list[int], Renderer]:
    return (
        tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")),
        words(MODEL / "tokenizer.json"),
        Renderer(str(MODEL)),
    )


def body(text: str, tokens: int) -> dict[str, Any]:
    return {"model": SERVED, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "stream": True}


def expected(text: str, tokens: int) -> str:
    tokenizer, ids, renderer = vocabulary()
    prompt = renderer.encode(renderer.chat(body(text, tokens)) or "", add_special_tokens=False)
    return str(tokenizer.decode(answer_ids(ids, len(prompt), tokens)))


@dataclass
class Outcome:
    text: str = ""
    error: str = ""
    """Status and code of a clear error; "connection" when the gateway itself went away."""
    done: bool = False
    wrong: str = ""
    seconds: float = 0.0
    first: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def whole(self) -> bool:
        return self.done and not self.error and not self.wrong


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    text: str,
    tokens: int,
    outcome: Outcome | None = None,
    deadline_s: float = 60.0,
) -> Outcome:
    """One streamed request to its end. `wrong` tells what no client may see: other words, two ends, a silent cut, a hang."""
    out = outcome or Outcome()
    want, clock = expected(text, tokens), asyncio.get_running_loop().time
    started = clock()
    try:
        async with asyncio.timeout(deadline_s):
            await _read(session, url, text, tokens, out)
    except TimeoutError:
        out.wrong = f"hung: {deadline_s} s"
    except (aiohttp.ClientError, ConnectionError) as e:
        out.error = f"connection: {type(e).__name__}"
    finally:
        out.seconds = clock() - started
        out.first.set()
    if not want.startswith(out.text):
        out.wrong = out.wrong or f"other words: {out.text!r}, not {want!r}"
    elif not out.error and not out.wrong and not (out.done and out.text == want):
        out.wrong = f"a silent cut after {len(out.text)} of {len(want)} characters, done={out.done}"
    return out


async def _read(session: aiohttp.ClientSession, url: str, text: str, tokens: int, out: Outcome) -> None:
    async with session.post(url + "/v1/chat/completions", json=body(text, tokens)) as r:
        if r.status != 200:
            error = json.loads(await r.read())["error"]
            out.error = f"{r.status} {error['code']}: {error['message']}"
            return
        async for line in r.content:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                out.wrong = "ended twice" if out.done else ""
                out.done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                out.error = f"stream {event['error'].get('code')}: {event['error'].get('message')}"
                continue
            for choice in event["choices"]:
                out.text += choice["delta"].get("content") or ""
                out.first.set()


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "whole": sum(o.whole for o in outcomes), "errors": sorted(o.error for o in outcomes if o.error), "wrong": [o.wrong for o in outcomes if o.wrong],
        "slowest_s": round(max(o.seconds for o in outcomes), 2),
    }  # fmt: skip
