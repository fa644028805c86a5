"""Case 26 (dynamo#6101): a tier that is slow or hung. The policy declines it per request; what it cannot foresee ends at the deadline."""

from __future__ import annotations

import time

from tests.kvtools.fixtures import names, stored


def test_a_slow_store_costs_its_deadline_once_then_the_breaker_spares_the_rest(make, proxy) -> None:
    chunks = names(4)
    stored(make(), chunks)
    reader = make(load_deadline_s=0.5, lookup_deadline_s=0.5, breaker_errors=2, breaker_open_s=30.0)
    proxy.fault("delay", 3.0)
    began = time.monotonic()
    assert reader.hit(reader.request(chunks=chunks), chunks) == 0
    first = time.monotonic() - began
    assert first < 3
    i = 0
    while reader.tier._opened.transport("default").available(False):
        i += 1
        assert i < 10, "the breaker does not open"
        more = names(4, f"more{i}")
        assert reader.hit(reader.request(chunks=more), more) == 0
    began = time.monotonic()
    assert reader.hit(reader.request(chunks=names(4, "other")), names(4, "other")) == 0
    assert time.monotonic() - began < 0.1, "an open breaker answers at once"
