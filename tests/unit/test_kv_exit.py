"""An engine that ends with chunks under way: its DRAM tier is unmapped, and what the store still has in hand touches no row."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

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
