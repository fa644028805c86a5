"""What only the connector sees, as metrics: the DRAM tier's fill and evictions, and time to first token by source.

HBM is vLLM's own `vllm:kv_cache_usage_perc`; vLLM's `kv_offload_cpu_cache_usage_perc` counts rows in use by transfers only.
Scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from components.common.kv.metrics import P

TTFT, EVICTED, DRAM_USED, DRAM_SIZE = (
    P + n for n in ("ttft_seconds", "dram_evictions", "dram_used_bytes", "dram_bytes")
)
SOURCES = ("compute", "hbm", "dram", "posix", "blob", "handover")
"""Where the KV of most of a prompt's prefix came from; the slowest tier that took part names the request."""
_FILL_S = 0.25


def definitions() -> dict[str, Any]:
    from vllm.v1.kv_offload.base import (
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
        OffloadingHistogramMetadata,
    )

    seconds = (0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0)
    return {
        TTFT: OffloadingHistogramMetadata(
            "Seconds from arrival to first token, by where the prefix came from.", ("source",), seconds
        ),
        EVICTED: OffloadingCounterMetadata("Chunks evicted from DRAM for others."),
        DRAM_USED: OffloadingGaugeMetadata("Bytes of DRAM rows that hold a chunk."),
        DRAM_SIZE: OffloadingGaugeMetadata("Bytes of the DRAM tier."),
    }


class Dram:
    """Watches vLLM's primary tier."""

    def __init__(self, primary: Any, row_bytes: int) -> None:
        self.evicted, self._told = 0, 0
        self._primary, self._row = primary, row_bytes
        evict = primary._policy.evict

        def counted(n: int, protected: Any) -> Any:
            out = evict(n, protected)
            self.evicted += len(out or ())
            return out

        primary._policy.evict = counted

    @property
    def used(self) -> int:
        """Bytes of rows that hold something."""
        return int(self._primary._num_allocated_chunks - len(self._primary._free_list)) * self._row

    def fill(self, stats: Any) -> None:
        if self.evicted > self._told:
            stats.increase_counter(EVICTED, self.evicted - self._told)
            self._told = self.evicted
        stats.set_gauge(DRAM_USED, float(self.used))
        stats.set_gauge(DRAM_SIZE, float(self._primary._num_chunks * self._row))


class FirstTokens:
    """Requests without a first token yet: {id: (vLLM's Request, source)}; bounded by the scheduler's own queues."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._waiting: dict[str, tuple[Any, str]] = {}
        self._over: list[tuple[str, float]] = []

    def begun(self, request: Any, source: str) -> None:
        self._waiting[request.request_id] = (request, source)

    def look(self) -> None:
        """After a step: who has a first token now?"""
        for name in [n for n, (r, _) in self._waiting.items() if r.num_output_tokens > 0]:
            self.ended(name)

    def ended(self, name: str) -> None:
        """The request has its first token, or is over without one (aborted: no sample)."""
        request, source = self._waiting.pop(name, (None, ""))
        if request is not None and request.num_output_tokens > 0:
            self._over.append((source, max(0.0, self._clock() - request.arrival_time)))

    def fill(self, stats: Any) -> None:
        for source, seconds in self._over:
            stats.observe_histogram(TTFT, seconds, (source,))
        self._over.clear()

    def __len__(self) -> int:
        return len(self._waiting)


class Observed:
    """Both, filled into vLLM's statistics a few times a second."""

    def __init__(self, dram: Dram | None) -> None:
        self.dram, self.first = dram, FirstTokens()
        self._due = 0.0

    def take(self, stats: Any) -> Any:
        """`stats`: what vLLM collected in this step, or None; returned with ours added."""
        self.first.look()
        now = time.monotonic()
        if now < self._due:
            return stats
        self._due = now + _FILL_S
        if stats is None:
            from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

            stats = OffloadingConnectorStats()
        if self.dram is not None:
            self.dram.fill(stats)
        self.first.fill(stats)
        return stats


def source_of(local: int, external: int, promoted: list[str], handed_over: bool) -> str:
    """`promoted`: stores that delivered chunks for the request."""
    if handed_over:
        return "handover"
    if external > 0:
        return "blob" if "blob" in promoted else promoted[0] if promoted else "dram"
    return "hbm" if local > 0 else "compute"
