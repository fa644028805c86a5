"""Our secondary tier inside vLLM's TieringOffloadingManager: DRAM <-> Blob, or DRAM <-> a directory.

Everything here runs on the scheduler thread and only touches dictionaries and queues; copies, digests and
transfers happen in `Mover` and in the transports. Any doubt about a chunk is a miss with a reason; vLLM then
computes it. Configured by `components.common.kv.build`; the connector adds what only it can see (cache groups).
"""

from __future__ import annotations

import json
import logging
import os
import queue
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from components.common.errors import DynamoBlobError
from components.common.kv import hooks, metrics
from components.common.kv.announced import Announced
from components.common.kv.config import KvTiersConfig
from components.common.kv.index import Index, MemoryIndex
from components.common.kv.keys import PUBLIC, is_tenant, object_name
from components.common.kv.lookups import Lookups
from components.common.kv.mover import Mover, Unit
from components.common.kv.namespaces import namespaces_of
from components.common.kv.objects import Codec
from components.common.kv.opened import Opened, open_tier
from components.common.kv.tier_state import End, Job, Requests, RequestState, handed_over
from components.common.kv.writes import WriteBudget

log = logging.getLogger(__name__)

TENANT, CLASS = "tenant", "class"
"""Keys of kv_transfer_params that name the owner of a request's KV (see `build.kv_params_for`)."""

_DRAIN_S, _CLOSE_S = 5.0, 3.0
"""Seconds an ending engine waits for chunks under way, and then for transports and index."""
_STATUS_S = 1.0
_STATS_S = 0.25


class DynamoBlobTier(SecondaryTierManager):
    """`settings` = KvTiersConfig as JSON, `store` = "blob" | "posix"."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        settings: dict[str, Any],
        store: str,
        index: Index | None = None,
        opened: Opened | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.config = KvTiersConfig.parse(settings, where="kv")
        self.store = store
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        self.namespaces = namespaces_of(offloading_spec, self.block_size_bytes)
        self._digests = {group: n.digest() for group, n in self.namespaces.items()}
        self._opened = opened or open_tier(
            self.config, store, self.block_size_bytes, list(self.namespaces.values()), offloading_spec.config.engine_id
        )
        self._index: Index = index or self._opened.index or MemoryIndex()
        codec = Codec(self.block_size_bytes, self._opened.mac_key)
        self._mover = Mover(
            self._opened.pool, codec, workers=self.config.workers, store_queue=self.config.store_queue,
            verify_puts=self.config.verify_puts, skip_proof=self.config.unsafe_skip_proof,
        )  # fmt: skip
        self._lookups = Lookups(self._index, self.config.lookup_deadline_s, self.config.lookup_window)
        self._writes = WriteBudget(self.config.write_amplification)
        self._jobs: dict[int, Job] = {}
        self._ends: queue.SimpleQueue[End] = queue.SimpleQueue()
        self._over: list[JobResult] = []
        self._storing: set[str] = set()
        self._announced = Announced(bool(offloading_spec.kv_events_config.enable_kv_cache_events))
        self.counts: Counter[tuple[str, str]] = Counter()
        self._stats = metrics.Recorder(f"{tier_type}:{store}")
        self._status_due = self._stats_due = 0.0
        self._lookups.found = self._found

    # ---- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        params = req_context.kv_transfer_params or {}
        tenant, cls = params.get(TENANT, PUBLIC), params.get(CLASS) or self._opened.default_class
        if not is_tenant(tenant):  # nobody: nothing is looked up or stored, and no name is ever made of it
            tenant = ""
        states = req_context.get_state(Requests)
        if states is None:
            states = Requests()
            req_context.set_state(states)
        states[id(self)] = RequestState(tenant, cls, self._opened.transport(cls) if tenant else None)
        return RequestOffloadingContext()

    def _request(self, context: ReqContext) -> RequestState:
        states = context.get_state(Requests)
        if states is None or id(self) not in states:
            self.on_new_request(context)
            states = context.get_state(Requests)
        assert states is not None
        return states[id(self)]

    def _name(self, request: RequestState, key: OffloadKey, context: ReqContext) -> str | None:
        """Name of the chunk's object; None while the tenant's purge generation is not known."""
        name = request.names.get(key)
        if name is None:
            namespace = self._opened.scope(request.tenant, self._digests[get_offload_group_idx(key)])
            if namespace is None:
                return None
            name = request.names[key] = object_name(request.tenant, namespace, get_offload_block_hash(key))
            end = context.get_offload_key_position(key)
            if end is not None:
                request.chain[get_offload_group_idx(key), end] = name
        return name

    # ---- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = self._request(req_context)
        if request.transport is None:
            return self._miss("ephemeral" if request.tenant else "tenant_invalid")
        if not request.transport.available(False):  # first: an outage costs no names and no questions
            return self._miss("breaker")
        if key in request.missed:
            return self._miss("failed_before")
        name = self._name(request, key, req_context)
        if name is None:
            return self._miss("generation_unknown")
        there = self._lookups.lookup(name, request.transport, req_context.req_id, get_offload_group_idx(key))
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    def peek(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """What the index knows of a chunk, without asking the store; None = it does not know."""
        request = self._request(req_context)
        if request.transport is None or key in request.missed or not request.transport.available(False):
            return False
        name = self._name(request, key, req_context)
        if name is None or self._lookups.is_negative(name):
            return False
        return self._index.lookup(name)

    def delivered(self, req_context: ReqContext) -> int:
        """Chunks that this tier brought for the request."""
        states = req_context.get_state(Requests)
        return states[id(self)].loaded if states is not None and id(self) in states else 0

    @property
    def loading_bytes(self) -> int:
        """Bytes of chunks asked for and not yet ended."""
        return sum(job.left for job in self._jobs.values() if job.load) * self.block_size_bytes

    def awaited(self) -> bool | None:
        """True: transfers are under way and no job of them can be over. None: the next step may see something. False: nothing is under way."""
        left = [job.left for job in self._jobs.values()]
        seen = self._lookups.open or (left and self._ends.qsize() >= min(left))
        return None if seen else bool(left)

    def _miss(self, reason: str) -> LookupResult:
        self._lookups.reasons[reason] += 1
        return LookupResult.MISS

    def _found(self, name: str) -> None:
        """Another worker stored it: HEAD says that it is there. Known here; its writer has told the others."""
        mine = getattr(self._index, "catalogue", self._index)
        mine.note_put(name, self._mover.codec.object_bytes, self._opened.default_class, 0.0)

    # ---- transfers

    def submit_load(self, job_metadata: TransferJob) -> None:
        request = self._request(job_metadata.req_context)
        name_of_request = job_metadata.req_context.req_id
        deadline = time.monotonic() + hooks.load_deadline(name_of_request, self.config.load_deadline_s)
        keys = list(job_metadata.keys)
        self._jobs[job_metadata.job_id] = Job(True, len(keys), name_of_request, self.loading_bytes)
        for key, chunk in zip(keys, job_metadata.chunk_ids, strict=True):
            name = self._name(request, key, job_metadata.req_context)
            assert name is not None and request.transport is not None
            self._mover.load(self._unit(False, name, int(chunk), deadline, job_metadata, key, request))

    def submit_store(self, job_metadata: TransferJob) -> None:
        request = self._request(job_metadata.req_context)
        deadline = time.monotonic() + self.config.store_deadline_s
        job = self._jobs[job_metadata.job_id] = Job(False, 0)
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            name = self._wanted(request, key, job_metadata.req_context)
            if name is None:
                continue
            unit = self._unit(True, name, int(chunk), deadline, job_metadata, key, request)
            self._storing.add(name)
            if self._mover.store(unit):
                job.left += 1
                job.total += 1
            else:
                self._storing.discard(name)
                self.counts["store_dropped", "queue_full"] += 1
        if not job.left:
            self._finish(job_metadata.job_id, job)

    def _wanted(self, request: RequestState, key: OffloadKey, context: ReqContext) -> str | None:
        """Name to store a chunk under; None when it is not to be stored (counted)."""
        name, reason = None, ""
        if request.transport is None or self._opened.transport(request.cls) is None:  # also when it became so meanwhile
            reason = "ephemeral" if request.tenant else "tenant_invalid"
        elif not request.transport.available(True):
            reason = "breaker"
        elif handed_over(key, context):
            reason = "handed_over"
        elif (name := self._name(request, key, context)) is None:
            reason = "generation_unknown"
        elif name in self._storing or self._index.lookup(name) is True:
            reason = "present"
        elif not self._writes.admit(name, self._mover.codec.object_bytes):
            reason = "write_budget"
        if reason:
            skipped = reason in ("present", "handed_over")
            self.counts["store_skipped" if skipped else "store_dropped", reason] += 1
            return None
        return name

    def _unit(
        self,
        store: bool,
        name: str,
        chunk: int,
        deadline: float,
        job: TransferJob,
        key: OffloadKey,
        request: RequestState,
    ) -> Unit:
        assert request.transport is not None
        job_id, context = job.job_id, job.req_context
        tenant, namespace = name.split("/", 2)[:2]
        group = get_offload_group_idx(key)
        end = context.get_offload_key_position(key) or 0
        parent = request.chain.get((group, end - self.namespaces[group].tokens_per_chunk))
        return Unit(
            store, request.transport, name, self._rows[chunk], deadline,
            lambda unit, reason: self._ends.put(
                End(job_id, key, unit, reason, request, parent, end, time.monotonic())
            ),
            guard=lambda: self._opened.current(tenant, namespace) and self._opened.transport(request.cls) is not None,
            flight=self._opened.flight(request.transport, name) if store else None,
        )  # fmt: skip

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._take_ends()
        over, self._over = self._over, []
        return over

    def _take_ends(self) -> None:
        while True:
            try:
                end = self._ends.get_nowait()
            except queue.Empty:
                return
            job = self._jobs[end.job_id]
            (self._stored if end.unit.store else self._loaded)(end, job)
            job.left -= 1
            job.ended = max(job.ended, end.at)
            if not job.left:
                self._finish(end.job_id, job)

    def _stored(self, end: End, job: Job) -> None:
        self._storing.discard(end.unit.name)
        codec = self._mover.codec
        self._stats.ended("write", end.reason, codec.object_bytes, time.monotonic() - end.unit.begun)
        self._stats.written(
            codec.object_bytes if end.unit.outcome is not None else 0, codec.row_bytes if end.reason == "ok" else 0
        )
        if end.reason != "ok":
            return
        job.good.append(end.key)
        job.nbytes += self._mover.codec.object_bytes
        self._lookups.stored(end.unit.name)
        saved = hooks.seconds_saved(end.tokens, self.namespaces[get_offload_group_idx(end.key)].tokens_per_chunk)
        self._index.note_put(end.unit.name, self._mover.codec.object_bytes, end.request.cls, saved, end.parent)
        self._announced.stored(end.key)

    def _loaded(self, end: End, job: Job) -> None:
        self._stats.ended("read", end.reason, self._mover.codec.object_bytes, time.monotonic() - end.unit.begun)
        if end.reason == "ok":
            job.good.append(end.key)
            job.nbytes += self._mover.codec.object_bytes
            end.request.loaded += 1
            self._index.note_hit(end.unit.name)
            self._announced.stored(end.key)
            return
        end.request.missed.add(end.key)
        self._lookups.negative(end.unit.name)
        if end.reason not in ("late", "failed", "refused", "closed"):  # the object itself is gone or wrong
            self._index.note_gone(end.unit.name, end.reason)
            self._announced.gone(end.key)

    def _finish(self, job_id: int, job: Job) -> None:
        del self._jobs[job_id]
        if job.load:
            asked, arrived = job.total * self.block_size_bytes, len(job.good) * self.block_size_bytes
            hooks.note_load(job.request, self.store, asked, arrived, job.ended - job.began, job.queued)
        self._over.append(
            JobResult(
                job_id, len(job.good) == job.total, tuple(job.good) or None, time.monotonic() - job.began, job.nbytes
            )
        )

    # ---- events, status, metrics

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._announced.take()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.end_of_step()
        if self.config.status_file and time.monotonic() >= self._status_due:
            self._status_due = time.monotonic() + _STATUS_S
            self._write_status()

    def status(self) -> dict[str, Any]:
        """Counters, and what the store holds for others: why there are no hits."""
        return {
            "store": self.store,
            "namespaces": {str(g): n.digest() for g, n in self.namespaces.items()},
            "other_namespaces": self._opened.others(),
            "misses": dict(self._lookups.reasons),
            "ends": dict(self._mover.reasons),
            "stores": {f"{a}_{b}": n for (a, b), n in self.counts.items()},
            "writes": self._writes.status(),
            "queued": {"loads": self._mover.queued_loads, "stores": self._mover.queued_stores},
            "transport": self._opened.stats(),
            "tenants_file": self._opened.problem,
            "directory": self._opened.upkeep.status() if self._opened.upkeep else None,
        }

    def _write_status(self) -> None:
        part = f"{self.config.status_file}.{self.store}.{os.getpid()}"
        try:
            with open(part, "w") as f:
                json.dump(self.status(), f)
            os.replace(part, f"{self.config.status_file}.{self.store}" if self._both() else self.config.status_file)
        except OSError as e:
            log.warning("the KV status file cannot be written: %s", e)

    def _both(self) -> bool:
        return bool(self.config.account and self.config.nvme_dir)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    def get_stats(self) -> Any:
        """Asked every step; answered a few times a second, so that a decode step does not pay for it."""
        now = time.monotonic()
        if now < self._stats_due:
            return None
        self._stats_due = now + _STATS_S
        others = Counter(",".join(sorted(o.get("differs", {}))) for o in self._opened.others())
        more = hooks.account() if self.store == "blob" or self.config.account is None else {}  # once a worker
        totals = {**self._opened.stats(), **more}
        return self._stats.take(self._lookups.reasons, self.counts, self._mover, totals, others)

    # ---- end

    def drain_jobs(self) -> None:
        """Bounded: every chunk has a deadline."""
        self._mover.drain(max(self.config.load_deadline_s, self.config.store_deadline_s) + 5.0)
        self._take_ends()
        self._announced.forget()

    def shutdown(self) -> None:
        """What is given up goes on in staging memory only. Raises when a chunk is copied for ever: DRAM then stays mapped."""
        ended = self._mover.close(_DRAIN_S)
        self._take_ends()  # what landed meanwhile goes into the index before it closes
        self._opened.close(_CLOSE_S)
        self._rows = np.empty((0, 0), np.uint8)  # the DRAM tier cannot be unmapped under a view
        if not ended:
            raise DynamoBlobError(
                "KV-SHUTDOWN", f"{self._mover.live} chunks are still being copied", where=self.tier_type
            )
