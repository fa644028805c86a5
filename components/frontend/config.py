"""Configuration of the HTTP gateway."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.common.config import Config


class GatewayConfig(Config):
    name: str = Field(description="process name, e.g. frontend-0")
    listen: str = Field("127.0.0.1:8000", description="host:port of the OpenAI API")
    upstream: str = Field(description="http://127.0.0.1:PORT of Dynamo's frontend (loopback only)")
    served_model: str = Field(description="model name clients use")
    model_path: str = Field(description="directory with tokenizer.json, config.json, chat template of the release")
    max_model_len: int = Field(gt=0, description="tokens; longer prompts are refused with 400")
    block_size: int = Field(gt=0, description="engine KV block, tokens")
    router: str = Field("", description="unix:/path or http://host:port of the router; empty = no pins, Dynamo's routing serves")
    router_deadline_ms: float = Field(50.0, gt=0, description="milliseconds to wait for a decision; late = no pin")
    auth: Literal["keys", "none"] = Field("keys", description="none is for loopback only")
    tenants_file: str = Field("", description="YAML: tenants, hashed keys, salt keys, limits; reloaded on change")
    max_body_bytes: int = Field(8 * 2**20, gt=0, description="bytes of a request body; larger = 413")
    max_concurrent: int = Field(256, gt=0, description="requests in flight; more = 429 with Retry-After")
    drain_s: float = Field(30.0, ge=0, description="seconds for answers in flight on SIGTERM")
