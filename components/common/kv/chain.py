"""The engine's chain of block hashes, computed outside of it: keys of objects, and marks of what is quarantined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def block_hashes(ids: Sequence[int], salt: str, block_tokens: int) -> Iterator[bytes]:
    """The engine's hash of every full block of a prompt, in order (sha256_cbor, vLLM's chain). About 20 us a block."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils as kv

    if not hasattr(kv, "NONE_HASH"):
        kv.init_none_hash(sha256_cbor)
    parent = None
    for at in range(0, len(ids) // block_tokens * block_tokens, block_tokens):
        extra = (("cache_salt", salt),) if salt and at == 0 else None
        parent = kv.hash_block_tokens(sha256_cbor, parent, tuple(ids[at : at + block_tokens]), extra)
        yield bytes(parent)


def chunk_hashes(ids: Sequence[int], salt: str, block_tokens: int, chunk_tokens: int) -> list[bytes]:
    """Hash of the last block of every full chunk: the key of its object."""
    whole = ids[: len(ids) // chunk_tokens * chunk_tokens]
    step = chunk_tokens // block_tokens
    return [h for n, h in enumerate(block_hashes(whole, salt, block_tokens), 1) if n % step == 0]
