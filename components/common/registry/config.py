"""Which release is served, and whose signatures prove it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.common.config import Config


class TrustConfig(Config):
    """Which signatures serving accepts. With `require` unset, digests alone prove the bytes (first run on a laptop)."""

    require: Literal["none", "signature", "approval"] = Field(
        "approval", description="none only for local experiments; `status` says so"
    )
    publisher_keys: tuple[str, ...] = Field((), description="Ed25519 public keys accepted on manifests, hex")
    approver_keys: tuple[str, ...] = Field((), description="Ed25519 public keys accepted on approvals, hex")


class ReleaseConfig(Config):
    """Which release is served."""

    model: str = Field(description="model name in the registry")
    version: str = Field("", description="version; empty = follow `channel` once at start")
    channel: str = Field("current", description="channel field to resolve when no version is given: current | previous")
    container: str = Field("weights", description="container of the registry")
    manifest_digest: str = Field(
        "", description="blake3 of the canonical manifest; when given, nothing else is accepted"
    )
