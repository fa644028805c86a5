"""Where a load-or-recompute policy plugs in (components.common.cost has ours).

A policy is a class named by `KvTiersConfig.policy` = {"class": ..., "module": ..., further keys = its arguments}:

    plan(RequestInfo) -> Plan                      asked once per request, on the scheduler thread: arithmetic only
    seconds_saved(end_tokens, chunk_tokens) -> float   optional: worth of one stored chunk, for retention
    account() -> {counter: total}                      optional: predicted, actual and regret, for metrics
    load_deadline(request, default_s) -> float         optional: seconds a promotion for this request may take
    note_load(request, tier, nbytes, arrived, seconds, queued)   optional: a measured promotion; bytes, queued = asked before it
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol

from components.common.errors import DynamoBlobError


class RequestInfo(NamedTuple):
    """What is known when a request is first scheduled. Tokens and bytes."""

    request_id: str
    prompt_tokens: int
    local_tokens: int
    """in HBM already"""
    chunk_tokens: int
    chunk_bytes: int
    tenant: str
    cls: str
    loads_queued: int
    """chunks other requests wait for in the secondary tiers"""


class Plan(NamedTuple):
    """load_tokens: most tokens to load beyond `local_tokens` (None = as many as hit). secondary: look beyond DRAM."""

    load_tokens: int | None = None
    secondary: bool = True


class Policy(Protocol):
    def plan(self, request_info: RequestInfo) -> Plan: ...


class LoadEverything:
    """The policy of an empty configuration."""

    def plan(self, request_info: RequestInfo) -> Plan:
        return Plan()


_current: Any = LoadEverything()


def install(config: dict[str, Any]) -> Policy:
    """The policy named by `config`, from now on the process's own. Raises KV-POLICY."""
    global _current
    if not config:
        policy: Policy = LoadEverything()
        _current = policy
        return policy
    rest = dict(config)
    module, name = rest.pop("module", ""), rest.pop("class", "")
    try:
        policy = getattr(importlib.import_module(module), name)(**rest)
    except Exception as e:
        raise DynamoBlobError(
            "KV-POLICY", "the load-or-recompute policy cannot be made", where=f"{module}.{name}", why=f"{type(e).__name__}: {e}",
            do="policy needs `module` and `class`, and the arguments that class takes",
        ) from None  # fmt: skip
    _current = policy
    return policy


def current() -> Any:
    return _current


def seconds_saved(end_tokens: int, chunk_tokens: int) -> float:
    worth = getattr(_current, "seconds_saved", None)
    return float(worth(end_tokens, chunk_tokens)) if worth else 0.0


def account() -> dict[str, float]:
    told = getattr(_current, "account", None)
    return dict(told()) if told else {}


def load_deadline(request: str, default_s: float) -> float:
    asked = getattr(_current, "load_deadline", None)
    return min(float(asked(request, default_s)), default_s) if asked else default_s


def note_load(request: str, tier: str, nbytes: int, arrived: int, seconds: float, queued: int) -> None:
    note = getattr(_current, "note_load", None)
    if note:
        note(request, tier, nbytes, arrived, seconds, queued)
