"""Names and namespaces: one name per (tenant, everything that decides the bytes, prefix)."""

import pytest

from components.common.errors import DynamoBlobError
from components.common.kv.keys import Namespace, object_name, parse_name

BASE = Namespace(
    weights_digest="ab" * 32,
    engine_version="0.31.0",
    platform="cpu",
    layout="LBHNC",
    group="0:FullAttentionSpec:2x65536",
    dtype="bfloat16",
    tokens_per_block=128,
    tokens_per_chunk=128,
    row_bytes=1 << 20,
    parallel="tp1.pp1.pcp1.dcp1",
)
OTHER = {
    "weights_digest": "cd" * 32,
    "engine": "other",
    "engine_version": "0.31.1",
    "platform": "cuda",
    "layout": "BLHNC",
    "group": "1:SlidingWindowSpec:2x65536",
    "dtype": "float32",
    "tokens_per_block": 64,
    "tokens_per_chunk": 256,
    "row_bytes": 1 << 21,
    "parallel": "tp2.pp1.pcp1.dcp1",
    "hash_algorithm": "sha256",
    "hash_seed": "0",
    "object_format": "dynamo-blob.kv/2",
}


def test_every_field_of_the_namespace_separates() -> None:
    assert set(OTHER) == set(Namespace.model_fields)
    digests = {BASE.digest()} | {BASE.model_copy(update={k: v}).digest() for k, v in OTHER.items()}
    assert len(digests) == len(OTHER) + 1


def test_the_digest_is_pinned() -> None:
    """A change of this value makes every stored chunk unreachable: bump OBJECT_FORMAT instead, knowingly."""
    assert BASE.digest() == PINNED


def test_difference_names_the_fields() -> None:
    assert BASE.differs(BASE.model_copy(update={"dtype": "float32"})) == {"dtype": ("bfloat16", "float32")}


def test_name_round_trip() -> None:
    key = bytes(range(32))
    name = object_name("1" * 32, BASE.digest(), key)
    assert name == f"{'1' * 32}/{BASE.digest()}/00/{key.hex()}"
    parsed = parse_name(name)
    assert parsed is not None and str(parsed) == name and parsed.hash == key.hex()


@pytest.mark.parametrize("tenant,key", [("../x", bytes(32)), ("1" * 31, bytes(32)), ("1" * 32, bytes(8))])
def test_bad_parts_are_refused(tenant: str, key: bytes) -> None:
    with pytest.raises(DynamoBlobError, match="KV-BAD-NAME"):
        object_name(tenant, "2" * 32, key)


@pytest.mark.parametrize(
    "name", ["", "a/b/c/d", f"{'1' * 32}/{'2' * 32}/ff/{'0' * 64}", f"{'1' * 32}/{'2' * 32}/namespace.json"]
)
def test_foreign_names_are_no_chunks(name: str) -> None:
    assert parse_name(name) is None


PINNED = "f2d7f5eb639ae644ab5e1e7f5787108f"
