"""Both ends at once: the front of a prompt is computed while the KV of its back is promoted into DRAM.

A request has one contiguous prefix in vLLM, so "back loaded, middle missing" cannot be said to it. Instead the
connector answers "nothing to load" and asks the tiers for the back, last chunk first. When the front has reached what
lies in DRAM the scheduler takes the request back once (`overlap_scheduler`): it returns with the front as a prefix hit
and the back as a load. Until then nothing of the back is part of the request: dropping a tail costs the reads, no more.

Where both ends meet is not planned but seen, step by step; `Policy.decide` only says where overlap is worth trying.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_offload.base import LookupResult, TierFilter

from components.common.kv import hooks
from components.common.kv.policy import CostConnector
from components.common.kv.tier import DynamoBlobTier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_LEAST = 2
"""Chunks that must be left to load: fewer are computed sooner than the request is taken back and copied to."""
_RATIO = 2
"""Overlap is planned where loading is at most so many times as fast as computing."""
_NOWHERE = TierFilter(matchers=())


class Tail:
    """The back of one prompt, in chunks of it: [ready, end) lies in DRAM, [asked, ready) is on its way."""

    def __init__(self, floor: int, end: int) -> None:
        self.floor, self.end = floor, end
        self.asked = self.ready = end

    def missed(self, at: int) -> None:
        """Chunk `at` will not come: the front must pass it, and what lies above it is all that can be loaded."""
        if self.ready == self.end == at + 1:
            self.end = self.ready = at
            self.asked = min(self.asked, at)
        else:
            self.floor = self.asked = at + 1


class OverlapConnector(CostConnector):
    """CostConnector that carries out `Decision.overlap_from`. Models with one full-attention group only."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role != KVConnectorRole.SCHEDULER:
            return
        self._tails: dict[str, Tail] = {}
        self._held: set[str] = set()
        tiers = [t for t in getattr(self.scheduler.manager, "secondary_tiers", ()) if isinstance(t, DynamoBlobTier)]
        self._window = max((2 * t.config.threads for t in tiers), default=0)
        groups = self.scheduler.config.kv_group_configs
        if len(groups) != 1 or groups[0].sliding_window_size_in_chunks is not None or not tiers:
            log.warning("KV-OVERLAP: this model has %d cache groups; load or compute, never both at once", len(groups))
            self._cost.policy.config = self._cost.policy.config.model_copy(update={"overlap": False})

    # ---- what the scheduler asks

    def must_step(self) -> bool:
        return bool(self._tails) or super().must_step()

    def step_tokens(self) -> int | None:
        """Most tokens of the next step while a tail is under way: in one large step there is nothing to overlap."""
        return self._cost.policy.config.overlap_step_tokens if self._tails else None

    def jumping(self, running: Iterable[Request]) -> list[Request]:
        """Called as a step begins: the running requests whose front has reached their tail; each is to be preempted."""
        self._held.clear()
        out = []
        for request in running if self._tails else ():
            tail = self._tails.get(request.request_id)
            if tail is None:
                continue
            try:
                if self._meets(request, tail, request.num_computed_tokens // self._chunk):
                    out.append(request)
                    self._held.add(request.request_id)
            except Exception:
                log.exception("KV-OVERLAP: %s is computed", request.request_id)
                self._tails.pop(request.request_id, None)
        return out

    # ---- the walk of both ends

    def _meets(self, request: Request, tail: Tail, front: int) -> bool:
        """One look at the tail of `request`, of which `front` chunks are there; True = go on with load, tail settled."""
        self._pump(request, tail, front)
        if tail.end - front < _LEAST:
            del self._tails[request.request_id]
            return False
        if front < tail.ready:
            return False
        status = self.scheduler._req_status[request.request_id]
        keys = status.group_states[self._group].offload_keys
        manager: Any = self.scheduler.manager  # a TieringOffloadingManager
        primary = manager.primary_tier
        end = front
        while end < tail.end and primary.lookup(keys[end], status.req_context) is LookupResult.HIT:
            end += 1
        del self._tails[request.request_id]
        if end - front < _LEAST:  # evicted for others since
            return False
        status.max_load_tokens = (end - front) * self._chunk
        status.req_context.load_tier_filter = _NOWHERE  # what is not in DRAM any more is computed
        self._cost.overlapped += 1
        return True

    def _pump(self, request: Request, tail: Tail, front: int) -> None:
        status = self.scheduler._req_status[request.request_id]
        keys, lookup, context = (
            status.group_states[self._group].offload_keys, self.scheduler.manager.lookup, status.req_context,
        )  # fmt: skip
        pending = 0
        for at in range(tail.ready - 1, tail.asked - 1, -1):
            if at < tail.asked:
                break
            pending += self._seen(tail, at, lookup(keys[at], context))
        step = -(-(self.step_tokens() or 0) // self._chunk)
        ahead = front + step  # the front will have passed these
        # What is asked for in one step comes back as one, when its last chunk is there: a whole window at once would leave
        # the link idle after it, and the front computing what has nearly come. A tier twice as fast brings this in a step.
        least = max(tail.floor, ahead, tail.asked - _RATIO * max(step, 1))
        while pending < self._window and tail.asked > least:
            tail.asked -= 1
            pending += self._seen(tail, tail.asked, lookup(keys[tail.asked], context))

    @staticmethod
    def _seen(tail: Tail, at: int, found: LookupResult) -> bool:
        """Note what became of chunk `at`; True while it is on its way."""
        if found is LookupResult.MISS:
            tail.missed(at)
        elif found is LookupResult.HIT and at == tail.ready - 1:
            tail.ready = at
        return found in (LookupResult.HIT_PENDING, LookupResult.RETRY)

    # ---- what vLLM asks

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        rid = request.request_id
        if rid in self._held:  # taken back in this very step; vLLM ends that step before it may load
            return None, False
        begins = rid not in self._plans
        if begins:
            plan = self._plans[rid] = self._plan(request, num_computed_tokens)
            self._apply(request, plan)
        tail = self._tails.get(rid)
        if tail is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        if request.num_preemptions:  # vLLM took it back for memory: an ordinary load of what has come and the rest
            del self._tails[rid]
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        if begins:
            self._pump(request, tail, num_computed_tokens // self._chunk)
            return None, False  # the next step is a small one
        if self._meets(request, tail, num_computed_tokens // self._chunk):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        return self._nothing(request, num_computed_tokens)

    def _nothing(self, request: Request, local: int) -> tuple[int | None, bool]:
        """What the base class does when its lookup finds nothing."""
        status = self.scheduler._req_status[request.request_id]
        for group in status.group_states:
            group.block_ids.clear()
        if status.transfer_jobs:
            return None, False
        status.update_offload_keys()
        status.num_locally_computed_tokens = local
        status.update_num_hit_chunks(local)
        self._observed.first.begun(request, self._source(request, local, 0))
        return 0, False

    def _decide(self, request: Request, local: int, mode: str) -> hooks.Plan:
        if mode == "overlap":
            return self._forced(request, local)
        plan = super()._decide(request, local, mode)
        decision: Any = self._open[request.request_id].decision
        if decision is None or decision.overlap_from is None or not plan.load_tokens:
            return plan
        self._cost.deadlines.pop(request.request_id, None)  # nobody waits for the tail
        first, end = local // self._chunk, (local + plan.load_tokens) // self._chunk
        self._tails[request.request_id] = Tail(first, end)
        return plan

    def _forced(self, request: Request, local: int) -> hooks.Plan:
        """`kv_cost_mode: overlap`: with all that is held, whatever the model says of it (benchmarks, tests)."""
        plan = super()._decide(request, local, "load")
        held, _ = self._peek(self.scheduler._req_status[request.request_id], local)
        if held and self._cost.policy.config.overlap:
            self._tails[request.request_id] = Tail(local // self._chunk, held[-1].end // self._chunk)
        return plan

    def _forget(self, rid: str) -> None:
        super()._forget(rid)
        self._tails.pop(rid, None)
        self._held.discard(rid)
