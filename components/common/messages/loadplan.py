"""How the router's load plan reaches the worker: as request metadata through Dynamo's frontend.

The frontend turns a request header ``x-dynamo-meta-<key>`` into ``context.metadata[<key>]`` on every worker that
serves the request, prefill and decode alike (run with Dynamo 1.6.1; tests/e2e/edge/test_load_plan_channel.py). Only the gateway
sets it: clients' own ``x-dynamo-*`` headers are stripped. No plan = the engine decides.

    gateway   headers |= header(decision)
    worker    plan = read(context.metadata)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import Field

from components.common.config import Config
from components.common.errors import DynamoBlobError
from components.common.messages.router import Decision

KEY = "load-plan"
HEADER = f"x-dynamo-meta-{KEY}"


class LoadPlan(Config):
    """`max_load_tokens`: most prompt tokens to load from tiers; None = the engine decides.
    `kv_load_tiers`: tiers to look in, in vLLM's own form; None = all, () = none."""

    max_load_tokens: int | None = Field(None, ge=0)
    kv_load_tiers: tuple[dict[str, str], ...] | None = None


class Metadata(Protocol):
    def get(self, key: str, default: Any = None) -> Any: ...


def header(decision: Decision) -> dict[str, str]:
    """The header that carries the decision's load plan; empty when it has none."""
    plan = {
        k: v
        for k, v in (("max_load_tokens", decision.max_load_tokens), ("kv_load_tiers", decision.kv_load_tiers))
        if v is not None
    }
    return {HEADER: json.dumps(plan, separators=(",", ":"), ensure_ascii=True)} if plan else {}


def read(metadata: Metadata | Mapping[str, str]) -> LoadPlan:
    """The plan in a worker's `context.metadata`; an empty plan when there is none. Raises LOAD-PLAN-INVALID."""
    raw = metadata.get(KEY)
    if not raw:
        return LoadPlan()
    try:
        return LoadPlan.parse(json.loads(raw), where=HEADER)
    except (ValueError, DynamoBlobError) as e:
        raise DynamoBlobError(
            "LOAD-PLAN-INVALID",
            "the load plan of a request cannot be read",
            where=HEADER,
            why=str(e),
            do="serve it without one",
        ) from None
