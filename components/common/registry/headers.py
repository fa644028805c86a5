"""Safetensors headers: parsed and checked against the file's size before anyone relies on them.

A header is 8 bytes of little-endian length and that many bytes of JSON: {name: {dtype, shape,
data_offsets: [begin, end]}}, offsets from the end of the header. Refused with REGISTRY-SAFETENSORS:
a header past the end, unknown dtypes, sizes that are not shape times dtype, overlaps, holes, bytes after the last tensor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from math import prod
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.registry.manifest import TensorEntry

HEADER_MAX = 100 * 2**20  # bytes; the format's own limit
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def tensor_index(file: str, size: int, read: Callable[[int, int], bytes]) -> list[TensorEntry]:
    """Tensors of `file` (`size` bytes), sorted by position; `read(offset, length)` gives its bytes."""

    def bad(why: str) -> DynamoBlobError:
        return DynamoBlobError(
            "REGISTRY-SAFETENSORS",
            "the safetensors file is not sound",
            where=file,
            why=why,
            do="fetch or export the file again",
        )

    if size < 8:
        raise bad(f"{size} bytes, a header needs 8")
    (length,) = struct.unpack("<Q", read(0, 8))
    if length > HEADER_MAX or 8 + length > size:
        raise bad(f"header of {length} bytes in a file of {size}")
    try:
        header = json.loads(read(8, length), object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise ValueError("not an object")
        entries = [_entry(name, file, 8 + length, item) for name, item in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as e:
        raise bad(f"header: {e}") from None
    entries.sort(key=lambda t: (t.begin, t.end))
    at = 8 + length
    for t in entries:
        if t.begin != at:
            raise bad(
                f"tensor '{t.name}' begins at byte {t.begin}, expected {at} ({'overlap' if t.begin < at else 'hole'})"
            )
        at = t.end
    if at != size:
        raise bad(f"the last tensor ends at byte {at}, the file has {size}")
    return entries


def _entry(name: str, file: str, base: int, item: dict[str, Any]) -> TensorEntry:
    dtype, shape = item["dtype"], tuple(item["shape"])
    begin, end = item["data_offsets"]
    if dtype not in BITS:
        raise ValueError(f"tensor '{name}' has unknown dtype '{dtype}'")
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in (*shape, begin, end)):
        raise ValueError(f"tensor '{name}' has a negative or fractional number")
    if (end - begin) * 8 != prod(shape) * BITS[dtype]:
        raise ValueError(f"tensor '{name}': {end - begin} bytes for shape {list(shape)} of {dtype}")
    return TensorEntry(name=name, file=file, dtype=dtype, shape=shape, begin=base + begin, end=base + end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out
