"""Whether this process's engine was told to end.

vLLM's EngineCore steps as long as a connector has transfers pending, also after SIGTERM: a put that hangs at the store
would hold it until its deadline (30 s), and the worker kills it before. The connector cannot see the signal, so the
one method of EngineCore that does is amended in place.
"""

from __future__ import annotations

from typing import Any

told = False


def install() -> None:
    """Amend vLLM's EngineCoreProc in this process; a second call changes nothing."""
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

    Core: Any = EngineCoreProc
    if getattr(Core, "_dynamo_blob_ending", False):
        return
    plain = Core._handle_shutdown

    def _handle_shutdown(self: Any) -> bool:
        global told
        told = told or self.shutdown_state != EngineShutdownState.RUNNING
        return bool(plain(self))

    Core._handle_shutdown = _handle_shutdown
    Core._dynamo_blob_ending = True
