"""What a worker knows of wrong KV: the quarantine, read by every role, and the shadow check where prompts are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from components.common.engine.shadow import Shadow
from components.common.kv.classes import home_of
from components.common.kv.config import KvTiersConfig
from components.common.kv.quarantine import Quarantine
from components.common.kv.store import KvStore
from components.common.storage.account import Account

_P = "vllm:dynamo_blob_kv_"  # Dynamo's worker exports the vllm: prefix


class Guarded(Collector):
    """One per worker, with an account of its own; its counters are metrics of the worker. `close` at the end."""

    def __init__(self, llm: Any, config: KvTiersConfig, worker: str, role: str, busy: Callable[[], bool]) -> None:
        assert config.account is not None
        self._account = Account(config.account)
        self._store = KvStore(self._account, home_of(config), threads=1)
        self.quarantine = Quarantine(
            self._store, int(llm.vllm_config.cache_config.block_size),
            refresh_s=config.epochs_refresh_s, stale_s=config.epochs_stale_s, closed=config.shadow_every > 0,
        )  # fmt: skip
        checks = config.shadow_every > 0 and role != "decode"  # what decode holds of a prompt came by way of prefill
        self.shadow = Shadow(llm, config, worker, busy, self.quarantine) if checks else None
        REGISTRY.register(self)

    def suffix(self, ids: Sequence[int], salt: str | None) -> str:
        """What the engine's salt of this request gets beyond the request's own (`Quarantine.suffix`)."""
        return self.quarantine.suffix(ids, salt or "")

    def note(self, ids: Sequence[int], salt: str, cached: int) -> None:
        """A request is over: `cached` of its prompt tokens were not computed; `salt` as the engine had it."""
        if self.shadow is not None:
            self.shadow.note(ids, salt, cached)

    async def close(self) -> None:
        REGISTRY.unregister(self)
        if self.shadow is not None:
            await self.shadow.close()
        await asyncio.to_thread(self.quarantine.close)
        self._store.close()
        self._account.close()

    def collect(self) -> Iterator[Metric]:
        q = self.quarantine
        yield GaugeMetricFamily(_P + "quarantine_marks", "Chains under quarantine that this worker knows of.", q.marks)
        yield GaugeMetricFamily(
            _P + "quarantine_stale",
            "1 while the quarantine cannot be read and nothing older is used.",
            float(q.cut_off),
        )
        yield CounterMetricFamily(
            _P + "quarantine_requests", "Requests kept from KV under quarantine.", float(q.resalted)
        )
        if self.shadow is None:
            return
        counters = self.shadow.checker.counters
        checks = CounterMetricFamily(
            _P + "shadow_checks", "Sampled hits by what came of their recomputation.", labels=["outcome"]
        )
        for outcome in ("checked", "wrong", "unjudged", "dropped", "failed"):
            checks.add_metric([outcome], float(counters[outcome]))
        yield checks
        yield CounterMetricFamily(
            _P + "shadow_hits", "Hits on chunks, of which one in shadow_every is checked.", float(counters["hits"])
        )
        found = GaugeMetricFamily(_P + "shadow_found", "Unix time of the newest wrong chunk; its key.", labels=["key"])
        if self.shadow.checker.found:
            found.add_metric([self.shadow.checker.found[0]], self.shadow.checker.found[1])
        yield found


async def open_guarded(
    llm: Any, settings: dict[str, Any], worker: str, role: str, busy: Callable[[], bool]
) -> Guarded | None:
    """The guard of a worker, or None when there is no Blob tier. Waits up to 3 s for the first read of the quarantine."""
    config = KvTiersConfig.parse(settings, where="kv")
    if config.account is None:
        return None
    guarded = Guarded(llm, config, worker, role, busy)
    await asyncio.to_thread(guarded.quarantine.start)
    return guarded
