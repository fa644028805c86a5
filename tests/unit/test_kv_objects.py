"""The object proves itself: any single changed byte, field or length is a doubt."""

import random

import pytest

from components.common.kv.objects import HEADER_BYTES, Codec

T, N, K = "1" * 32, "2" * 32, bytes(range(32))
ROW = 4096


def sealed(codec: Codec, fill: int = 0) -> bytearray:
    data = bytearray(HEADER_BYTES) + bytearray(random.Random(fill).randbytes(ROW))
    codec.seal(memoryview(data), T, N, K)
    return data


@pytest.mark.parametrize("mac", [None, b"k" * 32])
def test_good_object_passes(mac: bytes | None) -> None:
    codec = Codec(ROW, mac)
    data = sealed(codec)
    assert codec.check(memoryview(data), T, N, K) is None
    assert len(codec.row(memoryview(data))) == ROW


@pytest.mark.parametrize("mac", [None, b"k" * 32])
def test_every_flipped_byte_is_a_doubt(mac: bytes | None) -> None:
    codec = Codec(ROW, mac)
    data = sealed(codec)
    for at in [*range(HEADER_BYTES), *range(HEADER_BYTES, HEADER_BYTES + ROW, 61), HEADER_BYTES + ROW - 1]:
        data[at] ^= 1
        assert codec.check(memoryview(data), T, N, K) is not None, at
        data[at] ^= 1
    assert codec.check(memoryview(data), T, N, K) is None


def test_each_doubt_has_its_reason() -> None:
    codec = Codec(ROW)
    view = memoryview(sealed(codec))
    assert codec.check(view, "3" * 32, N, K) == "tenant"
    assert codec.check(view, T, "3" * 32, K) == "namespace"
    assert codec.check(view, T, N, bytes(32)) == "key"
    assert codec.check(view[:-1], T, N, K) == "length"
    assert Codec(ROW // 2).check(view, T, N, K) == "length"
    assert codec.check(memoryview(bytearray(HEADER_BYTES + ROW)), T, N, K) == "format"


def test_header_of_one_object_on_the_row_of_another() -> None:
    codec = Codec(ROW)
    one, two = sealed(codec, 1), sealed(codec, 2)
    assert codec.check(memoryview(one[:HEADER_BYTES] + two[HEADER_BYTES:]), T, N, K) == "digest"


def test_mac_refuses_plain_digests_and_other_keys() -> None:
    keyed = Codec(ROW, b"k" * 32)
    assert keyed.check(memoryview(sealed(Codec(ROW))), T, N, K) == "format"
    assert keyed.check(memoryview(sealed(Codec(ROW, b"x" * 32))), T, N, K) == "digest"
    assert Codec(ROW).check(memoryview(sealed(keyed)), T, N, K) == "format"
