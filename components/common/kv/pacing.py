"""An engine that only waits for transfers steps when there is something to see, not a thousand times a second.

While requests wait for KV from a tier, or puts are under way, and nothing is computed, vLLM's EngineCore schedules, asks
every worker and sleeps one millisecond, over and over: about one core of CPU for nothing (SmolLM2 on two cores: 5.1 CPU
seconds in a load of 5.2 s), taken from the transfers that it waits for. After a step that computed nothing it now rests until
a transfer is over, a client says something, or `REST_S` has passed. Steps that compute are never delayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

REST_S = 0.02
"""Longest rest: what other connectors of the engine learn (KV handed over meanwhile) is late by this much at most."""
_LOOK_S = 0.001

_tiers: list[Any] = []
_copying: Callable[[], bool] = lambda: False  # noqa: E731


def install(tiers: Iterable[Any], copying: Callable[[], bool]) -> None:
    """Amend vLLM's EngineCoreProc in this process (once), and rest while these tiers transfer (those with `awaited`).

    copying   whether the worker copies between HBM and DRAM: that takes milliseconds and only a step sees its end
    """
    global _copying
    _tiers[:] = [t for t in tiers if hasattr(t, "awaited")]
    _copying = copying
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    Core: Any = EngineCoreProc
    if getattr(Core, "_dynamo_blob_pacing", False):
        return
    plain = Core.post_step

    def post_step(self: Any, model_executed: bool) -> None:
        plain(self, model_executed)
        if model_executed or isinstance(self, DPEngineCoreProc):  # the latter step in company: all would wait
            return
        if not any(output.total_num_scheduled_tokens for _, output, _ in self.batch_queue or ()):
            rest(self.input_queue)

    Core.post_step = post_step
    Core._dynamo_blob_pacing = True


def rest(inbox: Any) -> None:
    """Return when a transfer is over, `inbox` has something, no transfer is under way, or after REST_S."""
    end = time.monotonic() + REST_S
    while inbox.empty() and awaited(_tiers) and not _copying() and time.monotonic() < end:
        time.sleep(_LOOK_S)


def awaited(tiers: Iterable[Any]) -> bool:
    """Whether transfers are under way and a step would see nothing new."""
    said = [t.awaited() for t in tiers]
    return any(said) and None not in said
