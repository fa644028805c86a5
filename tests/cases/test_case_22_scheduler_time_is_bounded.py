"""Case 22 (vllm PR#45765): lookups without bound on the scheduler thread. 10,000 chunks cost a bounded time per step."""

from __future__ import annotations

import time

from components.common.kv.index import MemoryIndex
from tests.kvtools.fixtures import names


def test_ten_thousand_unknown_chunks(make) -> None:
    scheduler = make(lookup_window=512, lookup_deadline_s=60.0)
    scheduler.tier._lookups._index = MemoryIndex()  # knows nothing: a complete index would say "absent" to the first
    chunks = names(10_000)
    request = scheduler.request(chunks=chunks)
    worst = 0.0
    for _ in range(3):
        began = time.thread_time()
        scheduler.scan(request, chunks)
        assert 0 < scheduler.tier._lookups.open <= 512
        scheduler.step()
        worst = max(worst, time.thread_time() - began)
    assert worst < 0.1, f"{worst * 1e3:.1f} ms of scheduler time in one step"


def test_ten_thousand_stores_are_dropped_beyond_the_queue(make) -> None:
    scheduler = make(rows=600, store_queue=64)
    chunks = names(500)
    request = scheduler.request(chunks=chunks)
    spent = []
    submit = scheduler.tier.submit_store

    def timed(job) -> None:
        began = time.thread_time()
        submit(job)
        spent.append(time.thread_time() - began)

    scheduler.tier.submit_store = timed
    scheduler.put(request, chunks)
    assert sum(spent) < 0.2, f"{sum(spent) * 1e3:.1f} ms of scheduler time for 500 chunks"
    assert scheduler.tier._mover.queued_stores <= 64
    scheduler.settle()
    status = scheduler.tier.status()
    assert status["stores"]["store_dropped_queue_full"] + status["ends"]["store_ok"] == 500
