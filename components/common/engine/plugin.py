"""vllm.general_plugins entry point: what every vLLM process of a worker needs beside the loader.

A handover past half of its lease is computed, not read (`components.common.kv.leased`): with or without KV tiers.
On a CPU NIXL's progress thread waits instead of spinning; on a GPU node a core per worker is cheap and latency is not.
"""

from __future__ import annotations

from importlib.util import find_spec


def register() -> None:
    if find_spec("nixl") is None:
        return
    from components.common.kv import leased

    leased.install()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from components.common.transfer.progress import wait_for_events

        wait_for_events()
