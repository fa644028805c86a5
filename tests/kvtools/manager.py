"""vLLM's real TieringOffloadingManager with our tier, without an engine: a test plays scheduler and worker."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from components.common.kv.build import offloading
from components.common.kv.config import KvTiersConfig

_ids = itertools.count()
ROW = 16384


class Scheduler:
    """One "engine": `rows` chunks of DRAM of `ROW` bytes; chunks are named by any string, their content by `content`."""

    def __init__(self, config: dict[str, Any], rows: int = 64, events: bool = True) -> None:
        from vllm.v1.kv_offload.config import (
            OffloadingCacheConfig,
            OffloadingConfig,
            OffloadingGroupConfig,
            OffloadingModelConfig,
            OffloadingParallelConfig,
        )

        from components.common.kv.spec import HostTieringSpec

        self.config = KvTiersConfig.parse({**config, "dram_bytes": rows * ROW})
        extra = offloading(self.config)["kv_connector_extra_config"]
        extra["dynamo_blob"] = {
            "weights_digest": self.config.weights_digest, "engine_version": "0.31.0", "platform": "cpu", "groups": ["0; test", "1; test"],
            "hash_algorithm": "sha256_cbor", "hash_seed": "0",
        }  # fmt: skip
        spec = HostTieringSpec(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(128, ("l0",), 0),), worker_kv_bytes_per_block=ROW, enable_kv_cache_events=events,
                extra_config=extra, engine_id=f"test-{os.getpid()}-{next(_ids)}", model=OffloadingModelConfig("m", "float32"),
                cache=OffloadingCacheConfig(128, 1),
                parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True), kv_cache_layout="LBHNC",
            )
        )  # fmt: skip
        self.manager: Any = spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self.view = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.view = np.empty(0)
        self.manager.shutdown()

    # ---- what vLLM's connector does

    def request(self, tenant: str = "0" * 32, cls: str = "default", chunks: Sequence[str] = ()) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(f"r{next(_ids)}", {"tenant": tenant, "class": cls})
        for i, chunk in enumerate(chunks):
            context.set_offload_key_position(key(chunk), (i + 1) * 128)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def put(self, context: Any, chunks: Sequence[str], content: str = "") -> int:
        """Chunks computed by the engine go to DRAM and on to the tier; how many were new."""
        keys = [key(c) for c in chunks]
        out = self.manager.prepare_store(keys, context)
        if out is None:
            return 0
        for k, row in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            name = next(c for c in chunks if key(c) == k)
            self.view[int(row)] = np.frombuffer(data(content or name), np.uint8)
        if out.keys_to_store:
            self.manager.complete_store(out.keys_to_store, context)
        return len(out.keys_to_store)

    def scan(self, context: Any, chunks: Sequence[str]) -> int | None:
        """One `get_num_new_matched_tokens`: leading chunks that hit, None = ask again."""
        from vllm.v1.kv_offload.base import LookupResult as R

        n, wait = 0, False
        for c in chunks:
            result = self.manager.lookup(key(c), context)
            if result is R.MISS:
                break
            wait |= result in (R.RETRY, R.HIT_PENDING)
            n += result in (R.HIT, R.HIT_PENDING)
        return None if wait else n

    def hit(self, context: Any, chunks: Sequence[str], timeout: float = 20.0) -> int:
        """Ask step after step until there is an answer; fails when there is none in time."""
        end = time.monotonic() + timeout
        while (n := self.scan(context, chunks)) is None:
            assert time.monotonic() < end, f"no answer within {timeout} s: the request would hang"
            self.step()
            time.sleep(0.001)
        return n

    def rows(self, context: Any, chunks: Sequence[str]) -> list[bytes]:
        """What would be copied to HBM."""
        spec = self.manager.prepare_load([key(c) for c in chunks], context)
        out = [self.view[int(row)].tobytes() for row in spec.chunk_ids]
        self.manager.complete_load([key(c) for c in chunks], context)
        return out

    def finish(self, context: Any) -> None:
        self.manager.on_request_finished(context)

    def settle(self, timeout: float = 30.0) -> None:
        """Steps until no transfer is under way."""
        end = time.monotonic() + timeout
        while self.manager.has_pending_work():
            assert time.monotonic() < end, "transfers do not end"
            self.step()
            time.sleep(0.001)

    def forget(self) -> None:
        """Empty DRAM."""
        self.manager.reset_cache()

    def reasons(self) -> dict[str, int]:
        return dict(self.tier.status()["misses"]) | dict(self.tier.status()["ends"])


def key(chunk: str) -> Any:
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(hashlib.sha256(chunk.encode()).digest(), 0)


def data(chunk: str) -> bytes:
    """The bytes of a chunk: decided by its name."""
    return hashlib.shake_128(chunk.encode()).digest(ROW)
