"""Metrics of the tiers against what really happened: write amplification, evictions, DRAM used, TTFT by source, other namespaces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from components.common.kv import metrics, observed
from components.common.kv.observed import Dram, FirstTokens, Observed, source_of
from tests.kvtools import kv
from tests.kvtools.fixtures import names, stored
from tests.kvtools.manager import ROW


def values(scheduler: Any, name: str) -> dict[tuple[str, ...], Any]:
    """{label values: value} of what the tier hands to vLLM now."""
    scheduler.tier._stats_due = 0.0
    return dict(scheduler.tier.get_stats()._values.get(name, {}))


def test_write_amplification_counts_every_byte_that_left(make, proxy, container) -> None:
    scheduler = make(breaker_errors=99)
    proxy.fault("status", 403, methods=("PUT",), match="/" + "0" * 32 + "/", count=2)
    stored(scheduler, names(4))
    sent = scheduler.tier._mover.codec.object_bytes
    ends = scheduler.tier.status()["ends"]
    assert (ends["store_ok"], ends["store_failed"]) == (2, 2)
    scheduler.tier._stats_due = 0.0
    stats = scheduler.tier.get_stats()._values
    assert stats[metrics.SENT] == {("DynamoBlobTier:blob",): 4 * sent}
    assert stats[metrics.AMPLIFICATION] == {("DynamoBlobTier:blob",): 4 * sent / (2 * ROW)}


def test_decode_leaves_to_prefill_what_prefill_stores(make, store, container) -> None:
    """A prompt that was handed over is stored once, by its prefill worker; decode stores what it generated."""
    scheduler, chunks = make(), names(5)
    request = scheduler.request(chunks=chunks)
    request.kv_transfer_params.update({"remote_num_tokens": 3 * 128 + 5, "kv_load_tiers": []})
    scheduler.put(request, chunks)
    scheduler.settle()
    assert len(kv.chunks(store, container)) == 2, "the two chunks behind the prompt"
    assert scheduler.tier.counts["store_skipped", "handed_over"] == 3


def test_dram_evictions_and_bytes(make) -> None:
    scheduler = make(rows=8)
    dram = Dram(scheduler.manager.primary_tier, ROW)
    assert dram.used == 0
    stored(scheduler, names(6))
    assert (dram.used, dram.evicted) == (6 * ROW, 0)
    stored(scheduler, names(5, "other"))
    assert (dram.used, dram.evicted) == (8 * ROW, 3)
    stats = Observed(dram).take(None)._values
    assert (
        stats[observed.EVICTED] == {(): 3} and stats[observed.DRAM_USED] == {(): 8.0 * ROW} == stats[observed.DRAM_SIZE]
    )


def test_other_namespaces_by_what_differs(make) -> None:
    stored(make(), names(1))
    other = make(weights_digest="cd" * 32)
    other.tier._opened.note.look()
    assert values(other, metrics.OTHERS) == {("DynamoBlobTier:blob", "weights_digest"): 1.0}
    other.tier._opened.note.found.clear()
    assert values(other, metrics.OTHERS) == {("DynamoBlobTier:blob", "weights_digest"): 0.0}


def test_throttled_small_requests_are_counted(make, proxy) -> None:
    from tests.kvtools.proxy import wait_for

    scheduler = make(epochs_refresh_s=0.2)
    proxy.fault("status", 503, match="_control/")
    wait_for(lambda: scheduler.tier._opened.stats()["throttled_total"] > 0, 60, "a throttled read is counted")
    proxy.heal()
    scheduler.tier._stats_due = 0.0
    assert scheduler.tier.get_stats()._values[metrics.P + "throttled_total"] != {}


def test_first_tokens_by_source() -> None:
    now = [100.0]
    first = FirstTokens(clock=lambda: now[0])
    a, b, c = (SimpleNamespace(request_id=n, num_output_tokens=0, arrival_time=99.0) for n in "abc")
    first.begun(a, "blob")
    first.begun(b, "hbm")
    first.begun(c, "compute")
    first.look()
    assert len(first) == 3, "nobody has a token yet"
    now[0], a.num_output_tokens = 100.5, 1
    first.look()
    now[0] = 103.0
    b.num_output_tokens = 4
    first.ended("b")
    first.ended("c")
    first.ended("unknown")
    taken: list[tuple[str, float, tuple[str, ...]]] = []
    first.fill(SimpleNamespace(observe_histogram=lambda *x: taken.append(x)))
    assert taken == [(observed.TTFT, 1.5, ("blob",)), (observed.TTFT, 4.0, ("hbm",))], "aborted: no sample"
    assert len(first) == 0


def test_the_slowest_tier_names_the_request() -> None:
    assert source_of(0, 0, [], False) == "compute" and source_of(256, 0, [], False) == "hbm"
    assert source_of(256, 128, [], False) == "dram" and source_of(0, 128, ["posix"], False) == "posix"
    assert source_of(0, 256, ["posix", "blob"], False) == "blob" and source_of(0, 0, [], True) == "handover"
