"""An engine that ends with chunks under way: its DRAM tier is unmapped, and what the store still has in hand touches no row."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from components.common.kv.store import JOURNAL_PREFIX
from tests.kvtools import kv
from tests.kvtools.azure import Store
from tests.kvtools.fixtures import names, stored
from tests.kvtools.proxy import FaultProxy, wait_for

CHUNKS = f"/{'0' * 32}/"
"""Paths of objects of requests without a tenant; the index's own are not among them."""


def ends(scheduler: Any) -> float:
    """Shuts the manager down as vLLM does; seconds. Fails when the DRAM tier stays mapped or keeps its name."""
    region, tier = scheduler.manager.primary_tier._mmap_region, scheduler.tier
    began = time.monotonic()
    scheduler.__exit__()
    seconds = time.monotonic() - began
    assert region.mmap_obj is None and not os.path.exists(region.mmap_path)
    assert tier._mover.live == 0, "every chunk has ended"
    return seconds


@pytest.fixture
def caught(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """vLLM logs a mapping that cannot be closed as a warning and goes on; its loggers do not propagate by themselves."""
    import logging

    for name in ("vllm", "vllm.v1"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    return caplog


def test_puts_and_loads_that_hang_at_the_store(make: Any, proxy: FaultProxy, caught: pytest.LogCaptureFixture) -> None:
    scheduler, chunks = make(store_deadline_s=60.0, load_deadline_s=60.0), names(2, "exit")
    stored(scheduler, chunks)
    scheduler.forget()
    proxy.fault("hang", methods=("GET", "PUT"), match=CHUNKS)
    request, more = scheduler.request(chunks=chunks), names(3, "more")
    scheduler.scan(request, chunks)
    scheduler.step()
    scheduler.put(scheduler.request(chunks=more), more)
    scheduler.step()
    wait_for(lambda: proxy.count(fault="hang") >= 5, 20, "five transfers hang")
    assert ends(scheduler) < 15
    assert not [r for r in caught.records if "mmap" in r.getMessage() or r.exc_info], caught.text
    proxy.heal()


def test_a_put_that_is_overdue_and_still_in_nixls_hands(
    make: Any, proxy: FaultProxy, caught: pytest.LogCaptureFixture
) -> None:
    scheduler, chunks = make(store_deadline_s=0.5), names(2, "late")
    proxy.fault("hang", methods=("PUT",), match=CHUNKS)
    stored(scheduler, chunks)
    assert scheduler.reasons()["store_late"] == 2 and scheduler.tier._opened.stats()["in_flight"] == 2
    assert ends(scheduler) < 15
    assert not [r for r in caught.records if "mmap" in r.getMessage() or r.exc_info], caught.text
    proxy.heal()


@pytest.mark.parametrize("verify", [0.0, 1.0])
def test_puts_that_land_while_the_engine_ends(
    make: Any, proxy: FaultProxy, store: Store, container: str, verify: float
) -> None:
    """They are in the index when it closes. One that would still have to be read back is not; nothing new is begun."""
    scheduler, chunks = make(store_deadline_s=60.0, verify_puts=verify), names(2, f"landing{verify}-")
    proxy.fault("delay", 1.0, methods=("PUT",), match=CHUNKS)
    scheduler.put(scheduler.request(chunks=chunks), chunks)
    scheduler.step()
    wait_for(lambda: proxy.count(fault="delay") >= 2, 20, "two puts are under way")
    assert ends(scheduler) < 15
    account = store.account()
    journals = [bytes(account.get(container, b.name)).decode() for b in account.list(container, JOURNAL_PREFIX)]
    noted = [line for text in journals for line in text.splitlines() if line.startswith("p") and "0" * 32 in line]
    assert len(kv.chunks(store, container)) == 2 and len(noted) == (0 if verify else 2), journals
    assert not verify or scheduler.tier._mover.reasons["store_closed"] == 2, scheduler.tier._mover.reasons
