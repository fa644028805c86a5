"""The catalogue as bytes: JSON lines, compressed, with a digest. Anything doubtful is no snapshot: listing rebuilds."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from blake3 import blake3

from components.common.kv.catalogue import Entry

_MAGIC = b"dynamo-blob.catalogue/1\n"
_LEVEL = 1


class Snapshot(NamedTuple):
    entries: list[Entry]
    offsets: dict[str, int]
    complete: bool


def encode(entries: Iterable[Entry], offsets: dict[str, int], complete: bool) -> bytes:
    """Magic, 32 bytes blake3 of what follows, then zlib of one JSON line of `offsets` and one line per entry."""
    squeeze = zlib.compressobj(_LEVEL)
    parts = [squeeze.compress(json.dumps({"offsets": offsets, "complete": complete}).encode() + b"\n")]
    for e in entries:
        line = f"{e.name} {e.nbytes} {e.cls} {e.created} {e.last_hit} {e.hits} {e.saves:.6g} {e.parent:x} {e.turn}\n"
        parts.append(squeeze.compress(line.encode()))
    parts.append(squeeze.flush())
    body = b"".join(parts)
    return _MAGIC + blake3(body).digest() + body


def decode(raw: bytes) -> Snapshot | None:
    """The snapshot; None when it is of another format, truncated or altered."""
    start = len(_MAGIC) + 32
    if raw[: len(_MAGIC)] != _MAGIC or blake3(raw[start:]).digest() != raw[len(_MAGIC) : start]:
        return None
    try:
        head, *lines = zlib.decompress(raw[start:]).decode().splitlines()
        meta = json.loads(head)
        entries = []
        for line in lines:
            name, nbytes, cls, created, last, hits, saves, parent, turn = line.split(" ")
            entries.append(
                Entry(
                    name, int(nbytes), cls, int(created), int(last), int(hits), float(saves), int(parent, 16), int(turn)
                )
            )
        offsets = {str(k): max(0, int(v)) for k, v in meta["offsets"].items()}
        return Snapshot(entries, offsets, bool(meta["complete"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, zlib.error):
        return None
