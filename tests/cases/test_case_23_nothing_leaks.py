"""Case 23 (LMCache#2017): pinned memory leaks over hours. 5,000 requests with aborts: everything is back to its base."""

from __future__ import annotations

import random

import psutil
import pytest

from tests.kvtools.fixtures import names


@pytest.mark.slow
def test_five_thousand_requests_with_aborts(make, proxy) -> None:
    scheduler = make(rows=32, store_queue=32)
    rng = random.Random(1)
    live: list[tuple[object, list[str]]] = []
    tier, manager = scheduler.tier, scheduler.manager
    base = None
    for i in range(5000):
        chunks = names(rng.randint(1, 6), f"p{rng.randrange(60)}-")
        request = scheduler.request(chunks=chunks)
        n = scheduler.scan(request, chunks)
        if n is not None:
            scheduler.put(request, chunks)
        live.append((request, chunks))
        if len(live) > 8:  # finished or aborted, whatever it waits for
            scheduler.finish(live.pop(rng.randrange(len(live)))[0])
        scheduler.step()
        if i == 1000:
            base = psutil.Process().memory_info().rss
    for request, _ in live:
        scheduler.finish(request)
    scheduler.settle(60)
    for _ in range(3):
        scheduler.step()
    assert manager._jobs == {} and manager._req_state == {} and tier._jobs == {} and not tier._storing
    assert tier._mover.live == 0 and tier._opened.pool.free == tier._opened.pool.count
    tier._opened.pool.check_integrity()
    stats = manager.primary_tier
    assert scheduler.put(scheduler.request(chunks=names(32, "last")), names(32, "last")) == 32, "no row is pinned"
    grown = psutil.Process().memory_info().rss - base
    assert grown < 64 << 20, f"{grown / 2**20:.0f} MiB more after 4,000 requests"
    assert stats is not None
