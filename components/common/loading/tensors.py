"""Tensors as views of verified memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from components.common.loading.plan import ITEM_BYTES
from components.common.registry.manifest import TensorEntry

if TYPE_CHECKING:
    import torch

_TORCH = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def tensor_of(buffer: torch.Tensor, offset: int, entry: TensorEntry) -> torch.Tensor:
    """The tensor `entry` whose bytes begin at `offset` of the uint8 tensor `buffer`: a view, or a copy if misaligned."""
    import torch

    dtype: Any = getattr(torch, _TORCH[entry.dtype])
    flat = buffer[offset : offset + entry.end - entry.begin]
    if (buffer.data_ptr() + offset) % ITEM_BYTES[entry.dtype] or offset % ITEM_BYTES[entry.dtype]:
        flat = flat.clone()
    return flat.view(dtype).view(entry.shape)
