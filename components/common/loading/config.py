"""What a worker (or the weight service) must know to get a release's weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.common.config import Config
from components.common.registry.config import ReleaseConfig, TrustConfig
from components.common.storage.config import AccountConfig

__all__ = ["ReleaseConfig", "TrustConfig", "WeightsConfig"]


class WeightsConfig(Config):
    release: ReleaseConfig
    account: AccountConfig
    trust: TrustConfig = TrustConfig()
    root: str = Field(
        description="absolute directory for small files: <root>/<weights digest>/ is the engine's model path on every worker"
    )
    service: str = Field("", description="unix:/path or host:port of the weight service; empty = read Blob directly")
    service_deadline_s: float = Field(
        20.0, gt=0, description="seconds to wait for the service before `on_outage` applies"
    )
    on_outage: Literal["wait", "use_cache", "keep_warm_replicas", "fail"] = Field(
        "use_cache", description="when neither service nor store answers"
    )
    cache_dir: str = Field(
        "",
        description="node cache directory, read-only here: used by `on_outage: use_cache` when neither service nor store answers; empty = none",
    )
    sealed_uid: int = Field(
        -1,
        ge=-2,
        description="uid of the weight service whose sealed files are taken without hashing them again; -1 = this process's own; -2 = nobody's, every byte is hashed here",
    )
    loader: Literal["dynamo_blob", "auto", "runai_streamer", "modelexpress"] = Field(
        "dynamo_blob", description="others need allow_unverified"
    )
    allow_unverified: bool = Field(False, description="accept a loader that does not verify; shown in `status`")
    range_in_flight: int = Field(8, ge=1, le=256, description="most ranges in flight; adapts below it")
    budget_bytes: int = Field(
        2 * 2**30, gt=0, description="host memory for ranges in flight and tensors not yet taken by the engine, bytes"
    )
    range_retries: int = Field(4, ge=0, description="retries of one range over all its sources")
    range_deadline_s: float = Field(30.0, gt=0, description="seconds one range may take on one source")
    deadline_s: float = Field(600.0, gt=0, description="seconds the whole load may take")
    report: str = Field(
        "",
        description="JSON file the loader writes its counters to (verified bytes, bytes by source, retries, seconds); empty = none",
    )
