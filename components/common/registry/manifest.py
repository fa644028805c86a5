"""The manifest of a release: canonical JSON that names every byte of a model.

Layout in the weights container (everything immutable but the channel):

    objects/<blake3>                                file bytes, content-addressed, created once
    releases/<model>/<version>/manifest.json        canonical JSON of `Manifest`, created once
    releases/<model>/<version>/manifest.sig         Ed25519 over the manifest bytes (JSON: key, signature, signed_at)
    approvals/<model>/<version>.json                signed by an approver
    channels/<model>.json                           current, previous, history; ETag compare-and-swap
    audit/...                                       append-only, hash chain
"""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3
from pydantic import Field

from components.common.config import Config

FORMAT = "dynamo-blob.manifest/1"
RANGE_BYTES = 8 * 2**20  # 8 MiB: above Azurite's 4 MiB double read, small enough to spread over connections


class FileEntry(Config):
    """One file of the model."""

    path: str = Field(description="relative POSIX path inside the model directory")
    size: int = Field(ge=0, description="bytes")
    blake3: str = Field(description="hex digest of the whole file")
    sha256: str = Field(description="hex digest of the whole file, for OpenSSF model-signing tools")
    blob: str = Field(
        description="blob name in the registry's container (objects/<blake3>), or in `container` when adopted"
    )
    container: str = Field("", description="container of an adopted file; empty = the registry's own")
    ranges: tuple[str, ...] = Field(
        description="blake3 hex of each `range_bytes` piece, in order; the last may be short"
    )


class TensorEntry(Config):
    """One tensor of a safetensors file, so that a loader can plan without reading headers."""

    name: str
    file: str = Field(description="path of the file that holds it")
    dtype: str = Field(description="safetensors dtype, e.g. BF16")
    shape: tuple[int, ...]
    begin: int = Field(ge=0, description="first byte in the file (absolute, header included)")
    end: int = Field(ge=0, description="one past the last byte in the file")


class Manifest(Config):
    format: str = FORMAT
    model: str
    version: str
    range_bytes: int = RANGE_BYTES
    files: tuple[FileEntry, ...] = Field(description="sorted by path")
    tensors: tuple[TensorEntry, ...] = Field(description="sorted by (file, begin)")
    weights_digest: str = Field(description="blake3 hex over the sorted file digests, see `weights_digest`")
    provenance: dict[str, Any] = Field(
        default_factory=dict, description="source, tool, versions, licence, remote_code flag"
    )

    def canonical(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, UTF-8, one trailing newline. These bytes are what is signed."""
        return canonical_json(self.model_dump(mode="json"))

    def digest(self) -> str:
        return blake3(self.canonical()).hexdigest()


def canonical_json(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


def weights_digest(file_digests: list[str]) -> str:
    """blake3 over the sorted blake3 hex digests of the files, newline-joined: names do not matter, bytes do."""
    return blake3("\n".join(sorted(file_digests)).encode()).hexdigest()
