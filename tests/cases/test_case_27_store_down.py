"""Case 27 (LMCache#779): store down means engine crash or half speed. Here the breaker opens, misses are free, and it recovers by itself."""

from __future__ import annotations

import time

import pytest

from tests.kvtools.fixtures import names, stored
from tests.kvtools.proxy import wait_for


def test_down_then_back(make, proxy, monkeypatch) -> None:
    chunks = names(4)
    stored(make(), chunks)
    reader = make(breaker_errors=3, lookup_deadline_s=0.5, load_deadline_s=1.0, store_deadline_s=1.0)
    proxy.fault("reset")
    for i in range(6):
        mine = names(2, f"down{i}-")
        request = reader.request(chunks=mine)
        assert reader.hit(request, mine, timeout=10) == 0
        reader.put(request, mine)
        reader.finish(request)
    reader.settle()
    assert not reader.tier._opened.transport("default").available(False)
    with monkeypatch.context() as patch:
        patch.setattr(reader.tier, "_name", lambda *_: pytest.fail("an object was named, hashed or asked for"))
        request, mine = reader.request(chunks=names(3, "open")), names(3, "open")
        before = reader.tier.counts["store_dropped", "breaker"]
        assert reader.hit(request, mine) == 0 and reader.put(request, mine) == 3
        reader.settle()
        assert reader.tier.counts["store_dropped", "breaker"] == before + 3 and reader.tier._mover.live == 0
    cost = cpu(lambda i: reader.hit(reader.request(chunks=names(50, f"x{i}-")), names(50, f"x{i}-")))
    assert cost < 0.01, f"{cost * 1e3:.2f} ms CPU for a miss of 50 chunks"
    proxy.heal()
    wait_for(lambda: reader.tier._opened.transport("default").available(False), 20, "recovers by itself")
    wait_for(lambda: reader.hit(reader.request(chunks=chunks), chunks) == 4, 20, f"hits again: {reader.reasons()}")


def cpu(do, n: int = 20) -> float:
    """CPU seconds of this thread per call."""
    began = time.thread_time()
    for i in range(n):
        do(i)
    return (time.thread_time() - began) / n
