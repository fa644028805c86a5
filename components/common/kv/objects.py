"""The KV object: a 128-byte header, then one row (all layers of one chunk, contiguous).

    0   4  magic "DBKV"
    4   2  version, little endian (1)
    6   1  digest kind: 1 = xxh3-128 (accidents), 2 = keyed blake3 (others can write the container)
    7   1  zero
    8   8  row length in bytes, little endian
    16 16  tenant
    32 16  namespace
    48 32  key
    80 32  digest of bytes 0..79 and the row (xxh3-128: 16 bytes, then zeros)
    112 16 zero

NIXL can neither set metadata nor tell a truncated or flipped body from a good one (both end DONE),
so everything that proves an object lies in its own bytes and is checked before anybody reads the row.
"""

from __future__ import annotations

import hmac
import struct
from typing import Literal

import xxhash
from blake3 import blake3

HEADER_BYTES = 128
MAGIC = b"DBKV"
VERSION = 1

XXH3, BLAKE3 = 1, 2

Doubt = Literal["format", "length", "tenant", "namespace", "key", "digest"]
"""Why an object is not what its name promises; each is a miss with this reason."""

_HEAD = struct.Struct("<4sHBBQ16s16s32s")
_DIGESTED = 80


class Codec:
    """Writes and checks objects of one row size.

    mac_key  None: xxh3-128, proof against accidents. 32 bytes: keyed blake3, proof against writers
             who lack the key; objects with a plain digest are then refused.
    """

    def __init__(self, row_bytes: int, mac_key: bytes | None = None) -> None:
        if mac_key is not None and len(mac_key) != 32:
            raise ValueError("the MAC key of KV objects is 32 bytes")
        self.row_bytes, self._mac_key = row_bytes, mac_key
        self.kind = XXH3 if mac_key is None else BLAKE3
        self.object_bytes = HEADER_BYTES + row_bytes

    def seal(self, buffer: memoryview, tenant: str, namespace: str, key: bytes) -> None:
        """Write the header before the row that already lies at buffer[HEADER_BYTES:object_bytes]."""
        head = _HEAD.pack(
            MAGIC, VERSION, self.kind, 0, self.row_bytes, bytes.fromhex(tenant), bytes.fromhex(namespace), key
        )
        buffer[:_DIGESTED] = head
        buffer[_DIGESTED:HEADER_BYTES] = self._digest(buffer).ljust(HEADER_BYTES - _DIGESTED, b"\0")

    def check(self, buffer: memoryview, tenant: str, namespace: str, key: bytes) -> Doubt | None:
        """None when `buffer` holds exactly the object of this name; else the first doubt."""
        if len(buffer) < self.object_bytes:
            return "length"
        magic, version, kind, zero, length, tenant_, namespace_, key_ = _HEAD.unpack(buffer[:_DIGESTED])
        if magic != MAGIC or version != VERSION or kind != self.kind or zero:
            return "format"
        if length != self.row_bytes:
            return "length"
        if namespace_.hex() != namespace:
            return "namespace"
        if tenant_.hex() != tenant:
            return "tenant"
        if key_ != key:
            return "key"
        found = bytes(buffer[_DIGESTED:HEADER_BYTES])
        wanted = self._digest(buffer).ljust(HEADER_BYTES - _DIGESTED, b"\0")
        return None if hmac.compare_digest(found, wanted) else "digest"

    def row(self, buffer: memoryview) -> memoryview:
        return buffer[HEADER_BYTES : self.object_bytes]

    def _digest(self, buffer: memoryview) -> bytes:
        """Over the first 80 bytes and the row: a header moved to another row is as wrong as a flipped byte."""
        if self._mac_key is None:
            fast = xxhash.xxh3_128(buffer[:_DIGESTED])
            fast.update(buffer[HEADER_BYTES : self.object_bytes])
            return fast.digest()
        mac = blake3(buffer[:_DIGESTED], key=self._mac_key)
        mac.update(buffer[HEADER_BYTES : self.object_bytes])
        return mac.digest()
