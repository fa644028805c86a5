"""Case 28 (sgl PR#31398): misses stall on prefetch. A workload without hits asks each chain once and never waits twice."""

from __future__ import annotations

from tests.kvtools.fixtures import names


def test_a_miss_asks_for_its_first_chunks_once(make, proxy) -> None:
    scheduler = make()
    proxy.seen.clear()
    chunks = names(20)
    assert scheduler.hit(scheduler.request(chunks=chunks), chunks) == 0
    assert proxy.count(method="HEAD") <= 20
    before = proxy.count(method="HEAD")
    for _ in range(5):
        request = scheduler.request(chunks=chunks)
        assert scheduler.scan(request, chunks) == 0, "known to be absent: no waiting, no asking"
    assert proxy.count(method="HEAD") == before


def test_a_complete_index_answers_without_asking(make, proxy) -> None:
    scheduler = make()
    scheduler.tier._index.catalogue.mark_complete()
    proxy.seen.clear()
    assert scheduler.scan(scheduler.request(chunks=names(20, "n")), names(20, "n")) == 0
    assert proxy.count(method="HEAD") == 0
