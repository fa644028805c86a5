"""Configuration of the HTTP gateway."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.common.config import Config
from components.common.loading.config import WeightsConfig


class GatewayConfig(Config):
    name: str = Field(description="process name, e.g. frontend-0")
    listen: str = Field("127.0.0.1:8000", description="host:port of the OpenAI API")
    ops_listen: str = Field("", description="host:port of /metrics and /debug; empty = on `listen`, fine for loopback")
    upstream: str = Field(description="http://127.0.0.1:PORT of Dynamo's frontend (loopback only)")
    more_upstreams: tuple[str, ...] = Field(
        (), description="further replicas of Dynamo's frontend; used in turn, the dead ones skipped"
    )
    served_model: str = Field(description="model name clients use")
    model_path: str = Field(description="directory with tokenizer.json, config.json, chat template of the release")
    weights: WeightsConfig | None = Field(
        None,
        description="how to get the release's small files (tokenizer, template) when they are not at model_path yet",
    )
    engine_kind: Literal["vllm", "mock"] = Field(
        "vllm", description="shown in /v1/models and /status; a mock never calls itself real"
    )
    max_model_len: int = Field(gt=0, description="tokens; longer prompts are refused with 400")
    block_size: int = Field(gt=0, description="engine KV block, tokens")
    router: str = Field(
        "", description="unix:/path or http://host:port of the router; empty = no pins, Dynamo's routing serves"
    )
    router_deadline_ms: float = Field(50.0, gt=0, description="milliseconds to wait for a decision; late = no pin")
    auth: Literal["keys", "none"] = Field("keys", description="none is for loopback only")
    tenants_file: str = Field("", description="YAML: tenants, hashed keys, salt keys, limits; reloaded on change")
    max_body_bytes: int = Field(8 * 2**20, gt=0, description="bytes of a request body; larger = 413")
    max_concurrent: int = Field(256, gt=0, description="requests in flight; more = 429 with Retry-After")
    drain_s: float = Field(30.0, ge=0, description="seconds for answers in flight on SIGTERM")
    body_deadline_s: float = Field(30.0, gt=0, description="seconds a client may take to send its body; longer = 408")
    connect_deadline_s: float = Field(3.0, gt=0, description="seconds to connect to Dynamo's frontend")
    idle_deadline_s: float = Field(
        300.0, gt=0, description="seconds without a byte from Dynamo's frontend before a request has failed"
    )
    frozen_after_s: float = Field(
        10.0,
        gt=0,
        description="seconds a small question to Dynamo's frontend may stay unanswered, with no byte from it otherwise, before it counts as frozen",
    )
    stall_deadline_s: float = Field(
        60.0, gt=0, description="seconds a client may leave an answer unread before it counts as gone"
    )
    health_every_s: float = Field(1.0, gt=0, description="seconds a health verdict is good for")
    canary_after_s: float = Field(
        10.0, gt=0, description="seconds without a successful request after which /health asks for one token to know"
    )
    trace_share: float = Field(
        1.0, ge=0, le=1, description="share of requests whose serving workers are asked of Dynamo (nvext.worker_id; some 190 bytes a streamed token)"
    )  # fmt: skip
    announce: str = Field(
        "", description="nats://host:port where promotions and purges are announced; empty = not heard of"
    )
    decisions_kept: int = Field(
        1024, ge=0, description="recent decisions kept for GET /debug/decisions/<request id>, loopback callers only"
    )
