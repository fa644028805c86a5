"""Configuration of the router component."""

from __future__ import annotations

from pydantic import Field

from components.common.config import Config


class RouterConfig(Config):
    name: str = Field(description="process name, e.g. router-0")
    namespace: str = Field(description="Dynamo namespace of the graph")
    discovery: str = Field("file", description="Dynamo discovery backend: file | etcd | kubernetes")
    request_plane: str = Field("tcp", description="Dynamo request plane")
    event_plane: str = Field("zmq", description="Dynamo event plane: zmq | nats")
    prefill_component: str = Field(
        "prefill", description="Dynamo component of the prefill pool; empty in an aggregated graph"
    )
    decode_component: str = Field("backend", description="Dynamo component of the decode (or aggregated) pool")
    endpoint: str = Field(
        "generate", description="endpoint name of both pools (the operator's probe expects `generate`)"
    )
    block_size: int = Field(gt=0, description="engine KV block, tokens; must equal the workers'")
    listen: str = Field(description="unix:/absolute/path or tcp host:port for decisions")
    http: str = Field("", description="host:port of /health and /metrics; empty = none")
    announce: str = Field(
        "", description="nats://host:port where promotions and purges are announced; empty = not heard of"
    )
    booking_ttl_s: float = Field(120.0, gt=0, description="seconds after which a booking nobody ended is dropped")
    host_hit_weight: float = Field(0.75, ge=0, le=1, description="credit of a block in a worker's DRAM, 1 = in HBM")
    blob_hit_weight: float = Field(0.25, ge=0, le=1, description="credit of a block in Blob")
