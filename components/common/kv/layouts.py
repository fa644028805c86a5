"""Which cache layouts the tiers serve. Proven ones only; everything else is refused by name.

Two checks of one rule: `check_config` before an engine exists (launcher, `dynamo check`) and `check_groups`
inside the engine, where the real cache groups are known. Types are compared exactly: MLAAttentionSpec
is a subclass of FullAttentionSpec, and its tiers were measured to change answers on the CPU build.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.common.errors import DynamoBlobError

CODE = "KV-UNSUPPORTED-LAYOUT"

HYBRID_ARCHITECTURES = ("FalconH1ForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM")
"""Mamba2 or GDN beside full attention, measured bit-equal in bf16."""

_ATTENTION = ("FullAttentionSpec", "SlidingWindowSpec")


def check_config(vllm_config: Any, platform_is_cpu: bool) -> None:
    """Refuse a VllmConfig (EngineArgs(...).create_engine_config()) whose tiers would not be proven."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    architecture = (list(model.architectures or []) or ["?"])[0]
    if model.use_mla:
        raise refusal(
            architecture, "multi-head latent attention (MLA)", "tier hits were measured to differ from a cold run"
        )
    if not cache.enable_prefix_caching:
        raise refusal(
            architecture, "prefix caching off",
            "without it there is no hash chain to name chunks by; the platform or engine.extra switched it off",
        )  # fmt: skip
    if model.is_hybrid:
        if architecture not in HYBRID_ARCHITECTURES:
            raise refusal(architecture, "recurrent layers", f"proven are {', '.join(HYBRID_ARCHITECTURES)}")
        if platform_is_cpu and "float32" in str(model.dtype):
            raise refusal(architecture, "recurrent layers in float32", "the CPU kernels exist for bfloat16 only")
    if getattr(cache, "prefix_caching_hash_algo", "sha256_cbor") != "sha256_cbor":
        raise DynamoBlobError(
            "KV-HASH", "the tiers need prefix_caching_hash_algo sha256_cbor", why=f"it is {cache.prefix_caching_hash_algo}",
            do="leave prefix_caching_hash_algo out of engine.extra: other hashes differ between processes or languages",
        )  # fmt: skip


def check_groups(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse cache groups of a type that is not proven, by exact type."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    model = vllm_config.model_config
    architecture = (list(model.architectures or []) or ["?"])[0]
    if not vllm_config.cache_config.enable_prefix_caching:
        raise refusal(architecture, "prefix caching off", "the platform switched it off")
    if vllm_config.speculative_config is not None:
        raise refusal(architecture, "speculative decoding", "tiers with draft groups are not proven")
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        for spec in iter_layer_specs(group.kv_cache_spec):
            _check_spec(architecture, i, spec)


def _check_spec(architecture: str, group: int, spec: Any) -> None:
    kind = f"{type(spec).__module__}.{type(spec).__qualname__}"
    name = kind.removeprefix("vllm.v1.kv_cache_interface.")
    if name in _ATTENTION:
        return
    if name == "MambaSpec":
        if spec.mamba_cache_mode != "align":
            raise refusal(
                architecture,
                f"group {group}: MambaSpec in mode {spec.mamba_cache_mode}",
                "only `align` saves states at chunk borders",
            )
        if architecture not in HYBRID_ARCHITECTURES:
            raise refusal(architecture, f"group {group}: MambaSpec", f"proven are {', '.join(HYBRID_ARCHITECTURES)}")
        return
    raise refusal(architecture, f"group {group}: {name}", f"proven are {', '.join(_ATTENTION)} and MambaSpec (align)")


def describe_groups(kv_cache_config: Any) -> list[str]:
    """One line per cache group with everything of it that decides the bytes of a chunk."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    out = []
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        specs: Sequence[Any] = list(iter_layer_specs(group.kv_cache_spec))
        spec = specs[0]
        parts = [str(i), type(spec).__name__, f"{len(group.layer_names)} layers", f"page {spec.page_size_bytes}"]
        for name in ("num_kv_heads", "head_size", "sliding_window", "dtype", "shapes", "dtypes", "mamba_type"):
            value = getattr(spec, name, None)
            if value is not None:
                parts.append(f"{name} {value}")
        out.append("; ".join(parts) + "; " + ",".join(group.layer_names))
    return out


def refusal(architecture: str, what: str, why: str) -> DynamoBlobError:
    return DynamoBlobError(
        CODE, f"the KV tiers do not serve this model: {what}", where=architecture, why=why,
        do="remove `kv:` from the graph (HBM and handover go on working), or serve a model of a proven layout",
    )  # fmt: skip
