"""Case 21 (vllm#49829): HIT_PENDING without a deadline. Here every answer comes: a hung load is a miss at its deadline."""

from __future__ import annotations

import time

from tests.kvtools.fixtures import names, stored


def test_hung_load_is_a_bounded_miss(make, proxy) -> None:
    chunks = names(4)
    stored(make(), chunks)
    reader = make(load_deadline_s=1.0, breaker_errors=99)
    proxy.fault("hang", methods=("GET",), match="kv-")
    began = time.monotonic()
    assert reader.hit(reader.request(chunks=chunks), chunks, timeout=10) == 0
    assert 0.8 < time.monotonic() - began < 4


def test_hung_existence_question_is_a_bounded_miss(make, proxy) -> None:
    chunks = names(4)
    reader = make(lookup_deadline_s=0.3, breaker_errors=99)
    proxy.fault("hang", methods=("HEAD",))
    began = time.monotonic()
    assert reader.hit(reader.request(chunks=chunks), chunks, timeout=10) == 0
    assert time.monotonic() - began < 2


def test_an_aborted_request_leaves_nothing_open(make, proxy) -> None:
    reader = make(breaker_errors=99)
    proxy.fault("hang", methods=("HEAD",))
    for i in range(20):
        request = reader.request(chunks=names(4, f"a{i}"))
        reader.scan(request, names(4, f"a{i}"))
        reader.step()
        reader.finish(request)
    wait = time.monotonic() + 10
    while reader.tier._lookups.open and time.monotonic() < wait:
        reader.step()
        time.sleep(0.01)
    assert reader.tier._lookups.open == 0
