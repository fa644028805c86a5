"""Case 20 (vllm#54363): no checksum and no deadline. Here: truncated, flipped, stalled, swapped objects are misses in time."""

from __future__ import annotations

import time

import pytest

from tests.kvtools import kv
from tests.kvtools.fixtures import names, stored
from tests.kvtools.manager import data, key


@pytest.mark.parametrize(
    "fault,arg,reason",
    [
        ("truncate", 1000, ""),
        ("flip", 9000, "digest"),
        ("flip", 50, "key"),
        ("stall", 2000, "late"),
        ("other", 0, "key"),
        ("status", 403, "failed"),
    ],
)
def test_bad_second_object(make, proxy, store, container, fault: str, arg: object, reason: str) -> None:
    chunks = names(4, f"{fault}{arg}")
    stored(make(), chunks)
    reader = make(load_deadline_s=1.5, breaker_errors=99)
    target = key(chunks[1])[:-4].hex()
    if fault == "other":
        arg = (
            "/kvtest/"
            + container
            + "/"
            + next(n for n in kv.chunks(store, container) if n.endswith(key(chunks[0])[:-4].hex()))
        )
    proxy.fault(fault, arg, methods=("GET",), match=target)
    request = reader.request(chunks=chunks)
    began = time.monotonic()
    assert reader.hit(request, chunks) == 1
    assert time.monotonic() - began < 6
    assert reader.rows(request, chunks[:1]) == [data(chunks[0])]
    ends = {k: n for k, n in reader.reasons().items() if k.startswith("load_") and k != "load_ok"}
    assert sum(ends.values()) == 1 and (not reason or ends == {f"load_{reason}": 1})


def test_the_primary_row_is_written_only_after_the_proof(make, proxy) -> None:
    chunks = names(1, "primary")
    stored(make(), chunks)
    reader = make()
    proxy.fault("flip", 9000, methods=("GET",), match=key(chunks[0])[:-4].hex())
    before = reader.view.copy()
    assert reader.hit(reader.request(chunks=chunks), chunks) == 0
    assert (reader.view == before).all()


def test_the_same_object_unharmed_hits(make) -> None:
    chunks = names(4, "fine")
    stored(make(), chunks)
    reader = make()
    assert reader.hit(reader.request(chunks=chunks), chunks) == 4
