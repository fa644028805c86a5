"""Names of KV objects: what must be equal for two engines to share a chunk of KV cache.

    <tenant>/<namespace>/<2 hex>/<hash>       inside the container of the retention class

    tenant     32 hex, from the composed salt (messages.salt); `PUBLIC` for requests without one
    namespace  32 hex, digest of everything that decides the bytes of a chunk besides its tokens
    hash       64 hex, the engine's hash of the chunk's last block (sha256_cbor: it chains over all
               earlier tokens and the salt), so one key names one prefix of one tenant

Light on purpose: the router imports it.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from blake3 import blake3
from pydantic import Field

from components.common.config import Config
from components.common.errors import DynamoBlobError

PUBLIC = "0" * 32
"""Tenant of requests that carry no composed salt (a graph with `auth: none`)."""

OBJECT_FORMAT = "dynamo-blob.kv/1"

_NAME = re.compile(r"^([0-9a-f]{32})/([0-9a-f]{32})/([0-9a-f]{2})/([0-9a-f]{64})$")


class Namespace(Config):
    """Everything besides the tokens that decides the bytes of a chunk. Another value = another namespace = no hit."""

    weights_digest: str = Field(description="digest of the released weights (never a model's name: names are reused)")
    engine: str = Field("vllm", description="engine that wrote the KV")
    engine_version: str = Field(description="its version; KV layouts change between releases")
    platform: str = Field(description="cpu | cuda: attention backends lay KV out differently")
    layout: str = Field(description="resolved KV cache layout, e.g. LBHNC")
    group: str = Field(description="cache group: index, spec type, layers, page bytes")
    dtype: str = Field(description="KV dtype")
    tokens_per_block: int = Field(gt=0, description="tokens of one engine block of this group")
    tokens_per_chunk: int = Field(gt=0, description="tokens of one object")
    row_bytes: int = Field(gt=0, description="bytes of one chunk over all tensors")
    parallel: str = Field(description="parallel layout, e.g. tp1.pp1.pcp1.dcp1")
    hash_algorithm: str = Field("sha256_cbor", description="hash of token blocks")
    hash_seed: str = Field("", description="PYTHONHASHSEED the hash chain started from; empty = unset")
    object_format: str = OBJECT_FORMAT

    def digest(self) -> str:
        """32 hex over the canonical JSON of every field."""
        text = json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))
        return blake3(b"dynamo-blob.kv.namespace\0" + text.encode()).hexdigest()[:32]

    def differs(self, other: Namespace) -> dict[str, tuple[object, object]]:
        """Fields that differ, as {name: (mine, theirs)}: why a store full of chunks gives no hit."""
        mine, theirs = self.model_dump(), other.model_dump()
        return {k: (v, theirs[k]) for k, v in mine.items() if v != theirs[k]}


class Name(NamedTuple):
    """The parts of an object's name."""

    tenant: str
    namespace: str
    hash: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.namespace}/{self.hash[:2]}/{self.hash}"


def object_name(tenant: str, namespace: str, key: bytes) -> str:
    """Name of the object of one chunk. `tenant` and `namespace` 32 hex, `key` 32 bytes. Raises KV-BAD-NAME."""
    name = f"{tenant}/{namespace}/{key.hex()[:2]}/{key.hex()}"
    if not _NAME.match(name):
        raise DynamoBlobError(
            "KV-BAD-NAME",
            "not the parts of a KV object's name",
            where=name,
            why="tenant and namespace are 32 lower-case hex digits, the key is 32 bytes (sha256)",
            do="use sha256_cbor as prefix_caching_hash_algo",
        )
    return name


def is_tenant(value: object) -> bool:
    """Whether `value` can stand for a tenant in a name."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value) is not None


def parse_name(name: str) -> Name | None:
    """The parts of an object's name; None for anything else in the container (it is left alone)."""
    found = _NAME.match(name)
    if not found or found[3] != found[4][:2]:
        return None
    return Name(found[1], found[2], found[4])


def tenant_prefix(tenant: str) -> str:
    """Prefix under which every object of a tenant lies, in each container: what a purge lists."""
    return f"{tenant}/"


def namespace_object(tenant: str, namespace: str) -> str:
    """Name of the small JSON that describes a namespace (why two workers do not share): never a chunk."""
    return f"{tenant}/{namespace}/namespace.json"
