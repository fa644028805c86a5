"""vllm.general_plugins entry point: what every vLLM process of a worker needs beside the loader.

A handover past half of its lease is computed, not read (`components.common.kv.leased`): with or without KV tiers.
"""

from __future__ import annotations

from importlib.util import find_spec


def register() -> None:
    if find_spec("nixl") is None:
        return
    from components.common.kv import leased

    leased.install()
