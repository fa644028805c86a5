"""Configuration of the weight service, and of a worker's access to weights."""

from __future__ import annotations

from pydantic import Field

from components.common.config import Config
from components.common.loading.config import WeightsConfig


class WeightServiceConfig(Config):
    name: str = Field(description="process name, e.g. weights-0")
    listen: str = Field(description="unix:/absolute/path or tcp host:port, see components.common.messages.weights")
    weights: WeightsConfig
    cache_dir: str = Field("", description="node cache: absolute directory on tmpfs; empty = no cache")
    cache_bytes: int = Field(0, ge=0, description="budget of the node cache, bytes")
    cache_uid: int = Field(
        64123,
        ge=-1,
        description="owner of cache files when the service runs as root, so that no worker owns them; -1 = the service's own uid",
    )
    seal: bool = Field(
        True,
        description="also keep complete files in sealed memory, as far as cache_bytes has room for both: workers of the node map those without hashing them again",
    )
    peers: tuple[str, ...] = Field((), description="other weight services: unix:/path or host:port")
    announce: str = Field(
        "",
        description="nats://host:port where promotions are announced; empty = a moved channel is noticed at the next start",
    )
    peer_name: str = Field("", description="this service's address as its peers name it; empty = `listen`")
    peer_deadline_s: float = Field(
        10.0,
        gt=0,
        description="seconds one range may take from a peer, its read from Blob included, before it comes from elsewhere",
    )
