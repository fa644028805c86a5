"""Prefill => decode: what travels with the KV, and when decode refuses it.

A prefill worker ends its stream with `disaggregated_params`:

    {"kv_transfer_params": {...vLLM's own...}, "identity": {...}, "suffix": "..."}

`identity` names everything two workers must agree on for the KV to mean the same thing. A decode
worker with another identity drops the KV and computes the prompt itself: the answer is right, the
refusal is logged and counted as KV-HANDOVER-REFUSED. vLLM's own handshake compares model path and
layout too, but fails without saying which. `suffix` says which quarantined KV (components/common/kv/quarantine.py) the
prefill worker knew of: one that knew less than this worker may have computed with it, and is refused the same way.
"""

from __future__ import annotations

from typing import Any

from components.common.engine.config import WorkerConfig
from components.common.errors import DynamoBlobError
from components.common.messages.salt import plain, suffixed

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


def offer(kv_transfer_params: dict[str, Any] | None, mine: dict[str, Any], suffix: str = "") -> dict[str, Any]:
    """`disaggregated_params` of a finished prefill, computed under a salt with this suffix."""
    return {"kv_transfer_params": kv_transfer_params, "identity": mine, "suffix": suffix}


def agreed(prefill_result: dict[str, Any] | None, mine: str) -> str:
    """Suffix under which decode keeps KV that it pulls: the longer one of both, when one goes on from the other.

    mine  what decode itself would append to the salt. A private suffix on either side ("~s": the quarantine cannot be
          read there, and nothing older is used) says nothing about the other side's.

    Raises KV-HANDOVER-REFUSED when the prefill worker did not know of a quarantine that this worker knows.
    """
    theirs = ((prefill_result or {}).get("disaggregated_params") or {}).get("suffix") or ""
    if not isinstance(theirs, str) or not suffixed(theirs):
        theirs = ""
    if theirs == mine or plain(theirs) or plain(mine):
        return mine
    if theirs.startswith(mine):
        return theirs
    raise DynamoBlobError(
        "KV-HANDOVER-REFUSED", "the prefill worker may have used KV that is under quarantine",
        where=f"salt suffix: prefill {theirs!r}, decode {mine!r}",
        why="it had not read the newest quarantine when the request began", do="nothing: this request is computed here instead",
    )  # fmt: skip


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
