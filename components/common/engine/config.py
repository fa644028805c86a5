"""Configuration of a worker: vLLM behind Dynamo's LLMEngine contract, in one of three roles."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from components.common.config import Config
from components.common.loading.config import WeightsConfig


class EngineArgs(Config):
    """The part of vLLM's arguments a graph may set (configs/engine/*.yaml). Everything is passed on as it stands."""

    dtype: str = Field("bfloat16", description="compute and KV dtype")
    max_model_len: int = Field(4096, gt=0, description="tokens of prompt + answer")
    max_num_seqs: int = Field(8, gt=0, description="sequences decoded together")
    max_num_batched_tokens: int = Field(2048, gt=0, description="tokens per engine step")
    block_size: int = Field(
        128,
        gt=0,
        description="tokens per KV block; large pieces transfer well (12-18 us per descriptor); CPU needs a multiple of 32",
    )
    kv_cache_bytes: int = Field(1 << 30, gt=0, description="bytes of HBM (CPU platform: host memory) for KV")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs per worker")
    enforce_eager: bool = Field(True, description="no compile, no graphs: start in seconds; set false on GPUs")
    threads: int = Field(1, ge=1, description="CPU platform: OpenMP threads of the engine")
    seed: int = Field(0, description="engine seed")
    extra: dict[str, Any] = Field(
        default_factory=dict, description="further AsyncEngineArgs, verbatim; checked against vLLM's own names"
    )


class KvConfig(Config):
    """The KV tiers of a worker (components/common/kv). Absent = HBM and handover only."""

    settings: dict[str, Any] = Field(
        default_factory=dict, description="KvTiersConfig of components.common.kv.config, validated there"
    )


class WorkerConfig(Config):
    name: str = Field(description="process name, e.g. prefill-0")
    role: Literal["prefill", "decode", "aggregated"]
    served_model: str = Field(description="model name clients use")
    namespace: str = Field(description="Dynamo namespace of the graph")
    component: str = Field(description="Dynamo component: prefill | backend")
    discovery: str = Field("file", description="Dynamo discovery backend: file | etcd | kubernetes | mem")
    request_plane: str = Field("tcp", description="Dynamo request plane")
    event_plane: str = Field("zmq", description="Dynamo event plane: zmq | nats")
    announce: str = Field(
        "", description="nats://host:port where promotions and purges are announced; empty = not heard of"
    )
    run_dir: str = Field(description="absolute directory of this run: sockets, reports")
    engine: EngineArgs = EngineArgs()
    weights: WeightsConfig
    kv: KvConfig | None = None
    engine_kind: Literal["vllm", "mock"] = Field(
        "vllm", description="mock = fake engine with prefix cache and KV events; says so in its model card and status"
    )
    mock_token_ms: float = Field(0.0, ge=0, description="mock only: milliseconds per token")
    mock_prefill_tokens_per_s: float = Field(
        0.0, ge=0, description="mock only: prefill rate, tokens/s, one prompt at a time; 0 = no time"
    )
    nixl_host: str = Field("127.0.0.1", description="address of vLLM's NIXL side channel; pod IP in a cluster")
    nixl_port: int = Field(
        5600, gt=0, lt=65536, description="port of the NIXL side channel; differs per engine on one host"
    )
    nixl_backends: tuple[str, ...] = Field(("UCX",), description="NIXL back ends for the prefill => decode handover")
    drain_s: float = Field(
        30.0, ge=0, description="seconds answers in flight may finish in on SIGTERM before they migrate"
    )
    warmup: bool = Field(True, description="one generation before ready (cold kernels cost up to 28 s)")
