"""Profiles: what an engine or a tier setting is on a named model and machine (configs/engine, configs/kv)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from components.common.engine.config import EngineArgs
from components.common.errors import DynamoBlobError, nearest
from graphs.document import Document, KeyPath, load
from graphs.load import Finding, type_name, validate
from graphs.spec import Size, Spec

POLICY = {"module": "components.common.kv.policy", "class": "CostPolicy"}
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class ModelFacts(Spec):
    """What the architecture says; every figure with its source."""

    weights_bytes: Size = Field(0, description="bytes of the weights; 0 = not stated")
    kv_bytes_per_token: Size = Field(0, description="KV bytes of one token over all layers at `dtype`; 0 = not stated")
    layout: Literal["full", "sliding+full", "mla", "linear+full"] = Field("full", description="KV cache layout")
    max_positions: int = Field(0, ge=0, description="longest context the model was made for, tokens; 0 = not stated")
    kv_layers: int = Field(0, ge=0, description="layers that keep KV of every token; 0 = not stated")
    kv_heads: int = Field(0, ge=0, description="KV heads of such a layer")
    head_dim: int = Field(0, ge=0, description="elements of one head")
    latent_dim: int = Field(0, ge=0, description="MLA: elements a layer keeps of one token (latent and rope)")
    state_bytes: Size = Field(0, description="recurrent state of one sequence over all layers, bytes; 0 = none")
    tiers: Literal["on", "refused"] = Field("on", description="whether the KV tiers serve this layout")
    tiers_reason: str = Field("", description="why they do, or do not")
    source: str = Field("", description="where the figures come from")
    estimate: bool = Field(False, description="figures are computed, not measured")


class EngineProfile(Spec):
    profile: str
    description: str = ""
    platform: Literal["cpu", "cuda"]
    hardware: str = Field("", description="machine the profile is made for, e.g. ND96isr_H100_v5")
    gpus: int = Field(0, ge=0, description="GPUs of one replica")
    model: ModelFacts = ModelFacts()
    engine: dict[str, Any] = Field(description="components.common.engine.config.EngineArgs")
    host_bytes: Size = Field(0, description="resident host memory of one worker beside weights and KV, bytes")
    shm_bytes: Size = Field(64 * 2**20, description="shared memory of one worker, bytes")
    ready_deadline_s: float = Field(180.0, gt=0, description="seconds from start to ready")


class CostSpec(Spec):
    """Load or recompute: what is believed before anything was measured. Absent = everything that is held is loaded."""

    hardware: str = Field(description="configs/hardware/<name>.yaml: the prefill curve")
    tiers: list[dict[str, Any]] = Field(description="components.common.cost.config.TierPrior of dram and blob")


class KvProfile(Spec):
    profile: str
    description: str = ""
    hardware: str = ""
    cost: CostSpec | None = Field(None, description="the cost model's priors; `kv.set.policy: {}` switches it off")
    settings: dict[str, Any] = Field(description="components.common.kv.config.KvTiersConfig, without account and names")


def read_engine_profile(name: str, where: str) -> tuple[EngineProfile, Document]:
    """The profile and its document. Raises PROFILE-UNKNOWN or PROFILE-INVALID."""
    document = _find("engine", name, where)
    profile, findings = validate(EngineProfile, document)
    return _checked(profile, findings, name, document), document


def read_kv_profile(name: str, where: str) -> tuple[KvProfile, Document]:
    document = _find("kv", name, where)
    profile, findings = validate(KvProfile, document)
    return _checked(profile, findings, name, document), document


def merged_kv(profile: KvProfile, more: Mapping[str, Any], where: str, overlap: bool = False) -> dict[str, Any]:
    """Settings of the tiers: the profile's, its cost policy, then the graph's own. Raises PROFILE-UNKNOWN, KV-OVERLAP."""
    policy: dict[str, Any] = {}
    if profile.cost is not None:
        hardware = _find("hardware", profile.cost.hardware, where).data
        policy = {"policy": {**POLICY, "hardware": hardware, "tiers": profile.cost.tiers}}
    merged = {**profile.settings, **policy, **more}
    if overlap:
        if merged.get("policy", {}).get("module") != POLICY["module"]:
            raise DynamoBlobError(
                "KV-OVERLAP", f"kv profile '{profile.profile}' has no cost model, and overlap is planned by it", where=where,
                why="without a measured prefill curve nobody knows where both ends would meet",
                do="choose a profile with `cost:`, or leave `overlap` out",
            )  # fmt: skip
        merged["policy"] = {**merged["policy"], "overlap": True}
    return merged


def _find(kind: str, name: str, where: str) -> Document:
    folder = CONFIGS / kind
    path = folder / f"{name}.yaml"
    if "/" in name or not path.is_file():
        known = [p.stem for p in folder.glob("*.yaml")]
        raise DynamoBlobError(
            "PROFILE-UNKNOWN",
            f"no {kind} profile '{name}'",
            where=where,
            why=f"it would be configs/{kind}/{name}.yaml",
            do=nearest(name, known),
        )
    document = load(path)
    return Document(f"configs/{kind}/{name}.yaml", document.data, document.text, document.marks)


def _checked(profile: Any, findings: list[Finding], name: str, document: Document) -> Any:
    if profile is None:
        error = findings[0].as_error()
        raise DynamoBlobError("PROFILE-INVALID", error.what, where=error.where, why=error.why, do=error.do)
    if profile.profile != name:
        raise DynamoBlobError(
            "PROFILE-INVALID",
            "the profile calls itself something else",
            where=document.place(("profile",)),
            why=f"file {name}.yaml, profile: {profile.profile}",
            do="make them equal",
        )
    return profile


def engine_args(layers: Sequence[tuple[Mapping[str, Any], Document, KeyPath]]) -> EngineArgs:
    """`EngineArgs` from several layers, later ones winning. Raises ENGINE-KEY-UNKNOWN or ENGINE-VALUE at the guilty line."""
    names = EngineArgs.model_fields
    merged: dict[str, Any] = {}
    origin: dict[str, tuple[Document, KeyPath]] = {}
    for values, document, base in layers:
        for key, value in values.items():
            if key not in names:
                raise DynamoBlobError(
                    "ENGINE-KEY-UNKNOWN", f"unknown engine setting '{key}'", where=document.place((*base, key)), why=nearest(key, names),
                    do="other vLLM arguments go under `extra`",
                )  # fmt: skip
            merged[key] = {**merged.get(key, {}), **value} if key == "extra" and isinstance(value, dict) else value
            origin[key] = (document, (*base, key))
    try:
        return EngineArgs.model_validate(merged, strict=True)
    except ValidationError as e:
        item = e.errors(include_url=False)[0]
        document, path = origin[str(item["loc"][0])]
        raise DynamoBlobError(
            "ENGINE-VALUE", f"wrong engine setting '{item['loc'][0]}'", where=document.place(path),
            why=f"{item['msg']} (found {type_name(item['input'])} {item['input']!r})", do="correct the value",
        ) from None  # fmt: skip
