"""Prefill => decode: what travels with the KV, and when decode refuses it.

A prefill worker ends its stream with `disaggregated_params`:

    {"kv_transfer_params": {...vLLM's own...}, "identity": {...}}

`identity` names everything two workers must agree on for the KV to mean the same thing. A decode
worker with another identity drops the KV and computes the prompt itself: the answer is right, the
refusal is logged and counted as KV-HANDOVER-REFUSED. vLLM's own handshake compares model path and
layout too, but fails without saying which.
"""

from __future__ import annotations

from typing import Any

from components.common.engine.config import WorkerConfig
from components.common.errors import DynamoBlobError

PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}


def identity(config: WorkerConfig, weights_digest: str, engine_version: str) -> dict[str, Any]:
    """What must be equal on both ends."""
    return {
        "weights": weights_digest,
        "engine": f"vllm-{engine_version}",
        "dtype": config.engine.dtype,
        "block_size": config.engine.block_size,
        "tensor_parallel_size": config.engine.tensor_parallel_size,
    }


def offer(kv_transfer_params: dict[str, Any] | None, mine: dict[str, Any]) -> dict[str, Any]:
    """`disaggregated_params` of a finished prefill."""
    return {"kv_transfer_params": kv_transfer_params, "identity": mine}


def accept(prefill_result: dict[str, Any] | None, mine: dict[str, Any]) -> dict[str, Any] | None:
    """vLLM's kv_transfer_params to pull the KV with; None when there is nothing to pull.

    Raises KV-HANDOVER-REFUSED when the other side's identity differs; the error names both values.
    """
    params = (prefill_result or {}).get("disaggregated_params") or {}
    transfer = params.get("kv_transfer_params")
    if not isinstance(transfer, dict) or not transfer.get("do_remote_prefill"):
        return None
    theirs = params.get("identity") or {}
    wrong = [f"{k}: prefill {theirs.get(k)!r}, decode {v!r}" for k, v in mine.items() if theirs.get(k) != v]
    if wrong:
        raise DynamoBlobError(
            "KV-HANDOVER-REFUSED", "the prefill worker's KV does not belong to this worker's model",
            where=str(transfer.get("remote_engine_id", "")), why="; ".join(wrong),
            do="start every worker of a graph from one plan; this request is computed here instead",
        )  # fmt: skip
    return transfer
