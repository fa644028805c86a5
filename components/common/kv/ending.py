"""Whether this process's engine was told to end, and how long it may go on then.

vLLM's EngineCore steps on after SIGTERM as long as any connector waits for something: a put that hangs at the store
until its deadline (30 s), KV that was handed over and that nobody pulls until its lease is over (the client left between
prefill and decode). The worker kills it before, and what the tiers do at their end (give up, close the index, take
this worker out of what purges ask) is not done. The connector cannot see the signal, so the one method of EngineCore
that does is amended in place.
"""

from __future__ import annotations

import time
from typing import Any

told = False

LEFT_S = 1.0
"""Seconds an engine without requests steps on for what connectors wait for: a pull under way. (A worker let 2 s pass since its last answer before.)"""


def install() -> None:
    """Amend vLLM's EngineCoreProc in this process; a second call changes nothing."""
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

    Core: Any = EngineCoreProc
    if getattr(Core, "_dynamo_blob_ending", False):
        return
    plain = Core._handle_shutdown
    idle_since: float | None = None

    def _handle_shutdown(self: Any) -> bool:
        global told
        nonlocal idle_since
        told = told or self.shutdown_state != EngineShutdownState.RUNNING
        goes_on = bool(plain(self))
        if not told or not goes_on or self.batch_queue or self.scheduler.has_unfinished_requests():
            idle_since = None
            return goes_on
        now = time.monotonic()
        idle_since = now if idle_since is None else idle_since
        return now - idle_since < LEFT_S

    Core._handle_shutdown = _handle_shutdown
    Core._dynamo_blob_ending = True
