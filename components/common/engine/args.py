"""WorkerConfig -> vLLM's AsyncEngineArgs. The one place where our names meet vLLM's."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from components.common.engine.config import WorkerConfig
from components.common.errors import DynamoBlobError, nearest

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}
LOADERS = {
    "dynamo_blob": "dynamo_blob",
    "auto": "auto",
    "runai_streamer": "runai_streamer",
    "modelexpress": "modelexpress",
}

WEIGHTS_ARGS = (
    "load_format", "model", "model_weights", "model_loader_extra_config", "hf_config_path", "tokenizer", "default_mm_loras", "download_dir",
)  # fmt: skip
"""vLLM arguments that decide which weights are loaded, and by whom."""


def check_extra(config: WorkerConfig) -> None:
    """Refuse settings that would let in weights or code that no manifest names. Raises WEIGHTS-UNVERIFIED-LOADER."""
    extra = config.engine.extra
    behind = [k for k in WEIGHTS_ARGS if k in extra]
    draft = extra.get("speculative_config")
    if isinstance(draft, dict) and draft.get("model"):
        behind.append("speculative_config.model")
    if behind and not config.weights.allow_unverified:
        raise DynamoBlobError(
            "WEIGHTS-UNVERIFIED-LOADER", f"engine.extra.{behind[0]} would let unverified weights in", where=f"{config.name}: engine.extra",
            why="model and loader belong to the plan", do="leave it out, or say engine.allow_unverified: true",
        )  # fmt: skip


def handover_connector(config: WorkerConfig) -> dict[str, Any] | None:
    """vLLM's NixlConnector for this role; None in an aggregated graph.

    `recompute`: when a pull fails, decode computes the prompt itself instead of failing the request.
    """
    if config.role == "aggregated":
        return None
    return {
        "kv_connector": "NixlConnector",
        "kv_role": KV_ROLE[config.role],
        "kv_buffer_device": "cpu" if on_cpu() else "cuda",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"backends": list(config.nixl_backends)},
    }


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def engine_args(config: WorkerConfig, model_path: str, kv_events_endpoint: str) -> AsyncEngineArgs:
    """Everything vLLM is told. `kv_events_endpoint` is an ipc:// address it binds, or empty for no events."""
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    e = config.engine
    fields: dict[str, Any] = {
        "model": model_path,
        "served_model_name": config.served_model,
        "dtype": e.dtype,
        "max_model_len": e.max_model_len,
        "max_num_seqs": e.max_num_seqs,
        "max_num_batched_tokens": e.max_num_batched_tokens,
        "block_size": e.block_size,
        "kv_cache_memory_bytes": e.kv_cache_bytes,
        "tensor_parallel_size": e.tensor_parallel_size,
        "enforce_eager": e.enforce_eager,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "seed": e.seed,
        "disable_log_stats": False,
        "load_format": LOADERS[config.weights.loader],
    }
    if config.weights.loader == "dynamo_blob":
        fields["model_loader_extra_config"] = {"weights": config.weights.model_dump(mode="json")}
    transfer = kv_transfer(config)
    if transfer is not None:
        fields["kv_transfer_config"] = KVTransferConfig(**transfer)
    if config.kv is not None:
        from components.common.kv.build import scheduler_args

        fields |= scheduler_args(config.kv.settings)
    if kv_events_endpoint:
        fields["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=kv_events_endpoint, topic=""
        )
    names = {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    check_extra(config)
    for key in e.extra:
        if key not in names:
            raise DynamoBlobError(
                "ENGINE-ARG-UNKNOWN",
                f"vLLM has no argument '{key}'",
                where=f"{config.name}: engine.extra",
                do=nearest(key, names),
            )
    return AsyncEngineArgs(**{**fields, **e.extra})


def kv_transfer(config: WorkerConfig) -> dict[str, Any] | None:
    """kv_transfer_config: the handover alone, or handover and tiers under MultiConnector."""
    handover = handover_connector(config)
    if config.kv is None:
        return handover
    from components.common.kv.build import kv_transfer_config

    transfer: dict[str, Any] = kv_transfer_config(config.kv.settings, handover)
    return transfer
