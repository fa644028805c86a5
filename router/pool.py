"""One pool of workers as the router sees it: who is there, and which prompt blocks each of them holds.

KvRouter (Dynamo, Rust) is the index: it subscribes to the pool's KV events. Only its lookup is used; choosing and
booking are ours (`score`, `bookings`), so that a choice can be explained and nothing inside it can leak.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from dynamo.llm import KvRouter, KvRouterConfig

from router.config import RouterConfig
from router.score import Overlap, overlap_of

log = logging.getLogger("router")


class Pool:
    """`component` is the Dynamo component of the pool. Nobody there yet is no error: the pool is empty."""

    def __init__(self, config: RouterConfig, runtime: Any, component: str) -> None:
        self.config, self.runtime, self.component = config, runtime, component
        self.client: Any = None
        self.index: Any = None
        self.error = ""

    async def open(self) -> None:
        """Connect client and index. May wait for the pool's first worker; run it as a task."""
        endpoint = self.runtime.endpoint(f"{self.config.namespace}.{self.component}.{self.config.endpoint}")
        self.client = await endpoint.client()
        self.index = KvRouter(
            endpoint=endpoint,
            block_size=self.config.block_size,
            kv_router_config=KvRouterConfig(
                host_cache_hit_weight=self.config.host_hit_weight,
                disk_cache_hit_weight=self.config.blob_hit_weight,
                router_event_threads=1,
            ),
        )

    async def keep_open(self, retry_s: float = 2.0) -> None:
        """`open` until it succeeds; says once what is wrong."""
        while self.index is None:
            try:
                await self.open()
                self.error = ""
            except Exception as e:
                if str(e) != self.error:
                    log.warning("pool %s: index not there yet: %s", self.component, e)
                self.error = str(e)
                await asyncio.sleep(retry_s)

    def workers(self) -> list[int]:
        return list(self.client.instance_ids()) if self.client is not None else []

    async def overlaps(self, ids: list[int], salt: str) -> dict[int, Overlap]:
        """{worker: overlap} over the workers the index knows; several ranks of a worker count as its best."""
        if self.index is None:
            return {}
        found = await self.index.get_overlap_scores(ids, cache_namespace=salt or None)
        out: dict[int, Overlap] = {}
        for row in found["workers"]:
            worker, overlap = int(row["worker_id"]), overlap_of(row)
            out[worker] = max(out.get(worker, Overlap()), overlap)
        return out

    async def held(self) -> dict[int, int]:
        """{worker: distinct blocks the index says it holds}, over all tiers. Walks the whole index: for audits."""
        out: dict[int, set[int]] = {}
        for item in await self.dump():
            stored = item["event"]["data"].get("stored") if isinstance(item["event"]["data"], dict) else None
            if stored:
                out.setdefault(int(item["worker_id"]), set()).update(b["block_hash"] for b in stored["blocks"])
        return {worker: len(blocks) for worker, blocks in out.items()}

    async def dump(self) -> list[dict[str, Any]]:
        """Every event that would rebuild the index; for audits, not for the request path."""
        return list(json.loads(await self.index.dump_events())) if self.index is not None else []
