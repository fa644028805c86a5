"""Configuration of a worker's KV tiers (configs/kv/*.yaml, `kv:` of a graph)."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from components.common.config import Config
from components.common.storage.config import AccountConfig

MIN_CHUNK, MAX_CHUNK = 2 * 2**20, 32 * 2**20
"""Bytes of a chunk that `check` does not warn about: below, requests cost more than bytes; above, a partial hit is coarse."""


class KvTiersConfig(Config):
    """HBM <-> DRAM (vLLM's OffloadingConnector) <-> Blob and/or a directory."""

    dram_bytes: int = Field(gt=0, description="bytes of DRAM tier; allocated and touched at start, in /dev/shm")
    blocks_per_chunk: int = Field(1, ge=1, description="engine blocks per object; chosen so that a chunk is 2-32 MiB")
    account: AccountConfig | None = Field(None, description="KV storage account; absent = no Blob tier")
    container: str = Field("", description="container of classes that name none")
    tenants_file: str = Field(
        "", description="absolute path of the tenants file (retention classes); empty = one class"
    )
    nvme_dir: str = Field("", description="absolute directory of an NVMe tier, looked in before Blob; empty = none")
    staging_bytes: int = Field(
        64 * 2**20,
        gt=0,
        description="staging memory of one secondary tier: chunks in flight x chunk bytes, never grows",
    )
    threads: int = Field(16, ge=1, le=256, description="requests in flight per container inside NIXL; hides latency")
    workers: int = Field(2, ge=1, le=32, description="threads that copy and digest chunks; about 3 GB/s each")
    lookup_deadline_s: float = Field(
        0.25, gt=0, description="seconds an existence question may take before it counts as a miss"
    )
    lookup_window: int = Field(
        512, ge=1, description="unanswered lookups of one request and cache group at a time; bounds scheduler time"
    )
    load_deadline_s: float = Field(
        5.0, gt=0, description="seconds from promotion to row, queueing included; later = miss"
    )
    store_deadline_s: float = Field(30.0, gt=0, description="seconds from store to visible, queueing included")
    store_queue: int = Field(64, ge=1, description="chunks waiting to be stored; the newest are dropped beyond it")
    write_amplification: float = Field(
        2.0,
        ge=1,
        description="bytes put per byte of distinct chunks, at most, per worker over about an hour; beyond it evicted chunks are not put again",
    )
    verify_puts: float = Field(0.0, ge=0, le=1, description="fraction of puts that is read back and proven")
    shadow_every: int = Field(
        0,
        ge=0,
        description="each object is recomputed and compared at one in so many hits on it, in idle time; 0 = never",
    )
    shadow_band: float = Field(
        0.25, gt=0, description="nats two logprobs may differ before an object counts as wrong; 0.01 holds in fp32"
    )
    mac_key_file: str = Field(
        "", description="file (mode 0600, 64 hex digits) for keyed digests: set it when others can write the container"
    )
    offload_prompt_only: bool = Field(
        False, description="false: chunks of answers are stored too, so that the next turn hits"
    )
    breaker_errors: int = Field(5, ge=1, description="consecutive failures after which a store is not asked any more")
    breaker_open_s: float = Field(1.0, gt=0, description="seconds to the first probe of an open breaker; doubles")
    breaker_max_open_s: float = Field(30.0, gt=0, description="longest wait between probes")
    announce: str = Field(
        "", description="nats://host:port where purges are announced; empty = noticed within epochs_refresh_s"
    )
    epochs_refresh_s: float = Field(5.0, gt=0, description="seconds between reads of the purge generations")
    epochs_stale_s: float = Field(
        20.0, gt=0, description="seconds without a good read after which nothing is looked up or stored"
    )
    eviction_policy: str = Field("lru", description="of the DRAM tier: lru | arc")
    policy: dict[str, Any] = Field(
        default_factory=dict, description="load-or-recompute policy: {class, module, ...its settings}; empty = load all"
    )
    status_file: str = Field(
        "", description="JSON file with the tier's counters and why there are no hits; empty = none"
    )
    weights_digest: str = Field("", description="digest of the weights; empty = last part of the engine's model path")
    unsafe_skip_proof: bool = Field(
        False, description="tests only: rows are used without proof at load. `check` refuses it"
    )

    @model_validator(mode="after")
    def _sound(self) -> KvTiersConfig:
        if self.account is not None and not (self.container or self.tenants_file):
            raise ValueError("account without container: name the KV container")
        if self.epochs_stale_s <= self.epochs_refresh_s:
            raise ValueError("epochs_stale_s must exceed epochs_refresh_s")
        return self
