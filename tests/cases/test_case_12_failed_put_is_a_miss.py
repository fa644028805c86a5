"""Case 12 (LMCache#4991): a store that failed must not stay visible, or the next hit is gibberish."""

from __future__ import annotations

import pytest

from tests.kvtools.fixtures import names, stored
from tests.kvtools.manager import data, key


@pytest.mark.parametrize("fault", ["status", "reset", "hang"])
def test_failed_put_is_not_indexed_and_not_hit(make, proxy, fault: str) -> None:
    scheduler = make(store_deadline_s=1.0, breaker_errors=99)
    chunks = names(4, fault)
    proxy.fault(fault, 403, methods=("PUT",), match=key(chunks[2])[:-4].hex())
    stored(scheduler, chunks)
    scheduler.forget()
    proxy.rules.clear()
    request = scheduler.request(chunks=chunks)
    assert scheduler.hit(request, chunks) == 2, "the chunk whose put failed ends the hit"
    assert scheduler.rows(request, chunks[:2]) == [data(c) for c in chunks[:2]]
    scheduler.put(request, chunks)  # the request that missed computed it
    scheduler.finish(request)
    scheduler.settle()
    scheduler.forget()
    again = scheduler.request(chunks=chunks)
    assert scheduler.hit(again, chunks) == 4, (
        "whoever computes a chunk that is not there stores it: one miss, not one each turn"
    )


def test_put_answered_but_damaged_on_the_way_is_caught_by_verify_puts(make, proxy) -> None:
    """`verify_puts` reads back: what does not prove itself is not indexed."""
    scheduler = make(verify_puts=1.0)
    proxy.fault("flip", 5000, methods=("GET",), match=key("v1")[:-4].hex())
    stored(scheduler, names(3, "v"))
    assert scheduler.reasons()["store_unverified"] == 1
    assert scheduler.reasons()["store_ok"] == 2
