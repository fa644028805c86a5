"""Metrics of a secondary tier, carried to Prometheus by vLLM's own connector statistics.

All names start with ``vllm:dynamo_blob_kv_`` (Dynamo's worker exports the ``vllm:`` prefix), label `tier`.
NIXL retries throttled requests itself and reports only the end: on transfers throttling shows as time and as failures;
`throttled_total` counts the account's 429 and 503 to the tier's own small requests, after their retries.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.common.kv.mover import Mover

P = "vllm:dynamo_blob_kv_"
MISSES, OPS, BYTES, SECONDS, DROPPED, REWRITES = (
    P + n for n in ("misses", "ops", "bytes", "op_seconds", "stores_dropped", "stores_deduplicated")
)
SENT, AMPLIFICATION, OTHERS = (P + n for n in ("write_sent_bytes", "write_amplification", "other_namespaces"))
_GAUGES = {
    "queued_loads": "chunks waiting to be read",
    "queued_stores": "chunks waiting to be written",
    "in_flight": "transfers in flight",
    "staging_used": "staging slots in use",
    "staging_quarantined": "staging slots whose transfer is overdue",
    "read_breaker_open": "1 while reads are not tried",
    "write_breaker_open": "1 while writes are not tried",
    "container_ok": "0 while the container is missing or unusable",
    "lanes": "NIXL back ends alive: more than one while an old credential drains",
}
_COUNTERS = {
    "breaker_opened_total": "times a breaker opened",
    "renewed_total": "back ends opened for a new credential",
    "replaced_total": "back ends opened because every transfer was overdue",
    "late_ended_total": "overdue transfers that ended after all",
    "throttled_total": "small requests of the tier that the account answered 429 or 503, retries included",
    "control_failures_total": "small requests of the tier (index, purge generations) that failed for good",
    "cost_requests_total": "requests that the cost model decided, load or recompute",
    "cost_loads_total": "of them, those that loaded",
    "cost_predicted_seconds_total": "seconds from decision to first token, as predicted",
    "cost_actual_seconds_total": "seconds from decision to first token, as they were",
    "cost_regret_seconds_total": "seconds by which the way taken was slower than the other was predicted",
    "cost_explored_seconds_total": "predicted seconds given away in requests, to learn",
    "cost_probed_seconds_total": "seconds of background reads, to learn",
    "cost_missed_deadlines_total": "loads given up at their deadline",
    "cost_overlaps_planned_total": "requests that the cost model planned so (`kv.overlap`)",
    "cost_overlapped_total": "requests whose front was computed while their back was loaded (`kv.overlap`)",
}


def definitions() -> dict[str, Any]:
    from vllm.v1.kv_offload.base import (
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
        OffloadingHistogramMetadata,
    )

    tier = ("tier",)
    seconds = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    out: dict[str, Any] = {
        MISSES: OffloadingCounterMetadata("Lookups answered with a miss, by reason.", ("tier", "reason")),
        OPS: OffloadingCounterMetadata("Chunks read or written, by how they ended.", ("tier", "op", "end")),
        BYTES: OffloadingCounterMetadata("Bytes of chunks read or written and proven.", ("tier", "op")),
        SECONDS: OffloadingHistogramMetadata("Seconds from queue to end of one chunk.", ("tier", "op"), seconds),
        DROPPED: OffloadingCounterMetadata("Chunks not written, by reason.", ("tier", "reason")),
        REWRITES: OffloadingCounterMetadata("Chunks not written because the store has them.", tier),
        SENT: OffloadingCounterMetadata("Bytes of objects sent to the store, however the write ended.", tier),
        AMPLIFICATION: OffloadingGaugeMetadata("Bytes sent for each byte of KV made visible, since the start.", tier),
        OTHERS: OffloadingGaugeMetadata(
            "Namespaces on the store that are not ours, by what differs.", ("tier", "differs")
        ),
    }
    out |= {P + name: OffloadingGaugeMetadata(text, tier) for name, text in _GAUGES.items()}
    out |= {P + name: OffloadingCounterMetadata(text, tier) for name, text in _COUNTERS.items()}
    return out


class Recorder:
    """Collects what vLLM fetches with get_stats; scheduler thread only."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._last: Counter[tuple[str, str]] = Counter()
        self._stats: Any = None
        self._sent = self._visible = 0
        self._others: set[str] = set()

    def ended(self, op: str, end: str, nbytes: int, seconds: float) -> None:
        stats = self._open()
        stats.increase_counter(OPS, 1, (self._tier, op, end))
        stats.observe_histogram(SECONDS, seconds, (self._tier, op))
        if end == "ok":
            stats.increase_counter(BYTES, nbytes, (self._tier, op))

    def written(self, sent: int, visible: int) -> None:
        """One chunk's write is over: bytes that went to the store, bytes of KV that can be found there now."""
        self._sent, self._visible = self._sent + sent, self._visible + visible

    def take(
        self,
        misses: Counter[str],
        stores: Counter[tuple[str, str]],
        mover: Mover,
        transport: dict[str, float],
        others: Counter[str] | None = None,
    ) -> Any:
        stats = self._open()
        self._rise(stats, SENT, ("sent", ""), self._sent, (self._tier,))
        if self._visible:
            stats.set_gauge(AMPLIFICATION, self._sent / self._visible, (self._tier,))
        others = others or Counter()
        self._others |= set(others)
        for differs in self._others:  # one that went is 0, not forgotten at its last value
            stats.set_gauge(OTHERS, float(others[differs]), (self._tier, differs))
        for reason, n in misses.items():
            self._rise(stats, MISSES, ("miss", reason), n, (self._tier, reason))
        for (kind, reason), n in stores.items():
            if kind == "store_skipped":
                self._rise(stats, REWRITES, (kind, reason), n, (self._tier,))
            else:
                self._rise(stats, DROPPED, (kind, reason), n, (self._tier, reason))
        gauges = {"queued_loads": mover.queued_loads, "queued_stores": mover.queued_stores, **transport}
        for name in _GAUGES:
            if name in gauges:
                stats.set_gauge(P + name, float(gauges[name]), (self._tier,))
        for name in _COUNTERS:
            self._rise(stats, P + name, ("transport", name), transport.get(name, 0.0), (self._tier,))
        self._stats = None
        return stats

    def _rise(self, stats: Any, name: str, key: tuple[str, str], value: float, labels: tuple[str, ...]) -> None:
        rise = value - self._last[key]
        if rise > 0:
            self._last[key] = value  # type: ignore[assignment]
            stats.increase_counter(name, rise, labels)

    def _open(self) -> Any:
        if self._stats is None:
            from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

            self._stats = OffloadingConnectorStats()
        return self._stats
