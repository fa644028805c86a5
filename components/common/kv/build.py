"""From settings to what vLLM is told: kv_transfer_config of an engine, kv_transfer_params of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.kv.config import MAX_CHUNK, MIN_CHUNK, KvTiersConfig
from components.common.kv.keys import PUBLIC
from components.common.messages.salt import Salt, parse

PACKAGE = "components.common.kv"
_PLAN_KEYS = ("max_load_tokens", "kv_load_tiers", "max_offload_tokens")
"""What the router may ask of the tiers, as vLLM spells it."""


def kv_transfer_config(
    settings: Mapping[str, Any] | KvTiersConfig, handover: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`kv_transfer_config` of a worker: tiers alone, or handover and tiers under MultiConnector.

    settings  KvTiersConfig, or its JSON. Raises CONFIG-INVALID.
    handover  config of NixlConnector for this role; None in an aggregated graph.

    The load failure policy stands at the top: vLLM's scheduler reads only that one, and its default fails requests.
    """
    config = settings if isinstance(settings, KvTiersConfig) else KvTiersConfig.parse(dict(settings), where="kv")
    tiers = offloading(config)
    if handover is None:
        return {**tiers, "kv_load_failure_policy": "recompute"}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [handover, tiers]},
    }


def offloading(config: KvTiersConfig) -> dict[str, Any]:
    """The connector of the tiers alone."""
    text = config.model_dump(mode="json")
    secondary = []
    if config.nvme_dir:
        secondary.append(_tier(text, "posix"))
    if config.account is not None:
        secondary.append(_tier(text, "blob"))
    module, connector = "connector", "DynamoBlobConnector"
    if overlaps(config):
        module, connector = "overlap", "OverlapConnector"
    elif _priced(config):
        module, connector = "policy", "CostConnector"
    return {
        "kv_connector": connector,
        "kv_connector_module_path": f"{PACKAGE}.{module}",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": f"{PACKAGE}.spec",
            "cpu_bytes_to_use": config.dram_bytes,
            "blocks_per_chunk": config.blocks_per_chunk,
            "eviction_policy": config.eviction_policy,
            "offload_prompt_only": config.offload_prompt_only,
            "self_describing_kv_events": True,
            "secondary_tiers": secondary,
            "settings": text,
        },
    }


def overlaps(config: KvTiersConfig) -> bool:
    """Whether this worker may compute a prompt's front while its back loads (`policy.overlap`)."""
    return _priced(config) and bool(config.policy.get("overlap"))


def scheduler_args(settings: Mapping[str, Any] | KvTiersConfig) -> dict[str, Any]:
    """vLLM arguments beside kv_transfer_config: overlap needs a hook in the scheduler, and steps that end before the next."""
    config = settings if isinstance(settings, KvTiersConfig) else KvTiersConfig.parse(dict(settings), where="kv")
    if not overlaps(config):
        return {}
    return {"scheduler_cls": f"{PACKAGE}.overlap_scheduler.OverlapScheduler", "async_scheduling": False}


def _priced(config: KvTiersConfig) -> bool:
    return config.policy.get("module") == f"{PACKAGE}.policy"


def _tier(settings: dict[str, Any], store: str) -> dict[str, Any]:
    return {"type": "DynamoBlobTier", "module_path": f"{PACKAGE}.tier", "store": store, "settings": settings}


def kv_params_for(
    role: str, request: Mapping[str, Any], salt: Salt | str | None, remote_kv: bool = False
) -> dict[str, Any]:
    """The tiers' part of kv_transfer_params for one request.

    salt       the composed cache salt (parsed or not); None = traffic without a tenant
    remote_kv  decode: the prompt's KV comes by handover, so nothing is looked up; what decode adds is stored

    A salt of another shape belongs to no tenant that could purge it: its KV stays in HBM and DRAM.
    """
    parsed = parse(salt) if isinstance(salt, str) else salt
    if salt and parsed is None:
        return {"tenant": "", "class": "", "kv_load_tiers": []}
    params: dict[str, Any] = {
        "tenant": parsed.tenant if parsed else PUBLIC,
        "class": parsed.cls if parsed else "",
    }
    plan = request.get("kv_plan") or {}
    params.update({k: plan[k] for k in _PLAN_KEYS if plan.get(k) is not None})
    if remote_kv:
        params["kv_load_tiers"] = []
    return params


def chunk_warnings(config: KvTiersConfig, kv_bytes_per_token: int, block_size: int) -> list[str]:
    """What `check` says about chunk and staging size; raises KV-STAGING when staging is too small to start."""
    from components.common.kv.opened import MIN_SLOTS

    chunk = kv_bytes_per_token * block_size * config.blocks_per_chunk
    out = []
    if not MIN_CHUNK <= chunk <= MAX_CHUNK:
        out.append(
            f"a chunk is {chunk / 2**20:.1f} MiB ({config.blocks_per_chunk} blocks of {block_size} tokens): "
            f"2-32 MiB transfer well; set kv.blocks_per_chunk"
        )
    if config.staging_bytes < MIN_SLOTS * chunk:
        raise DynamoBlobError(
            "KV-STAGING", "staging memory is too small for chunks of this size", where="kv.staging_bytes",
            why=f"{MIN_SLOTS} chunks of {chunk} bytes are needed, staging_bytes is {config.staging_bytes}",
            do=f"set staging_bytes to at least {MIN_SLOTS * (chunk + 4096)}",
        )  # fmt: skip
    if config.unsafe_skip_proof:
        raise DynamoBlobError(
            "KV-UNSAFE", "unsafe_skip_proof is for tests", where="kv.unsafe_skip_proof", do="remove it"
        )
    return out
