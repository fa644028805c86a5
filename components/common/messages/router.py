"""Messages between gateway and router: one JSON object per line over a Unix socket; in a cluster the
same objects as HTTP bodies (``POST /v1/decide``, ``POST /v1/note``).

    decide: Decide -> Decision (same `n`)
    note:   Note   -> no answer. "first" = first byte seen (prefill over), "done" = request over or failed.

The router only decides: it never sees tokens of the answer, and its death costs the hint, not the request.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.common.config import Config


class Decide(Config):
    op: Literal["decide"] = "decide"
    n: int = Field(description="number of this question on this connection; the answer repeats it")
    rid: str = Field(description="request id, the handle of the booking")
    ids: list[int] = Field(description="prompt token ids")
    salt: str = Field("", description="composed cache salt = router namespace; empty = unsalted")
    max_tokens: int = Field(0, ge=0, description="tokens the client asked for at most, 0 = unknown")


class Decision(Config):
    n: int
    prefill: int | None = Field(None, description="instance id of the prefill worker to pin; null = no advice")
    overlap_blocks: int = Field(0, description="prompt blocks that worker already holds")
    local: bool = Field(False, description="prefill and decode on one worker are cheaper")
    max_load_tokens: int | None = Field(
        None, description="load plan: most tokens to load from tiers; null = engine decides"
    )
    kv_load_tiers: list[dict[str, str]] | None = Field(
        None, description="load plan: tiers to look in; null = all, [] = none"
    )
    error: str = Field("", description="why there is no advice")


class Note(Config):
    op: Literal["first", "done"]
    rid: str
    served: int | None = Field(
        None, description="done: instance id of the prefill worker that served, as Dynamo reported it; null = not known"
    )
    cached_tokens: int | None = Field(
        None, description="done: prompt tokens the worker had cached, from its own usage; null = not known"
    )
