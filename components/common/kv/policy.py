"""Load or recompute inside the engine: our cost model on vLLM's scheduler thread.

`CostConnector` decides once per request, in `get_num_new_matched_tokens`, before a lookup is paid for: it peeks at
what DRAM and the indexes of the secondary tiers know (dictionaries, no I/O), asks the policy, and caps the load.
Everything it learns from comes from the engine itself: steps (prefill), promotions (tiers), copies (DRAM to HBM).

Named in a graph as `policy: {module: components.common.kv.policy, class: CostPolicy, ...CostConfig}`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_offload.base import LookupResult

from components.common.cost.config import CostConfig
from components.common.cost.decide import Held, Loading, Request
from components.common.cost.policy import Decision, Policy
from components.common.kv import hooks
from components.common.kv.connector import DynamoBlobConnector
from components.common.kv.steps import Steps
from components.common.kv.tier import DynamoBlobTier
from components.common.telemetry.spans import open_spans

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request as EngineRequest

log = logging.getLogger(__name__)

DRAM = "dram"
MODE_KEY = "kv_cost_mode"
"""kv_transfer_params key: `load`, `recompute` (or `overlap`, where a graph has it) force one way for one request, which then teaches nothing (benchmarks)."""
_LEAST_TOKENS = 64
"""Prefill tokens of a step from which its time says something about prefill."""
_STATUS_S = 1.0
_SAME_STEP_S = 0.005
_REFUSALS = 32
"""Requests in a row that may be refused a question to the store before one is asked whatever the odds."""


class CostPolicy:
    """The policy of `hooks.install`. Settings: CostConfig, and `status_file` (JSON for `status --explain`; empty = none)."""

    def __init__(self, status_file: str = "", **settings: Any) -> None:
        self.config = CostConfig.parse(settings, where="kv.policy")
        self.status_file = status_file
        self.policy = Policy(self.config)
        self.deadlines: dict[str, float] = {}
        self.untaught: set[str] = set()
        self.overlapped = self.overlaps_planned = 0

    def bind(self, bytes_per_token: int, chunk_tokens: int, step_tokens: int, lanes: Mapping[str, int] = {}) -> None:
        """What only the running engine knows; called before the first request. `lanes` by tier, where the config has none."""
        hardware = self.config.hardware.model_copy(update={"kv_bytes_per_token": bytes_per_token})
        tiers = tuple(
            t if "lanes" in t.model_fields_set else t.model_copy(update={"lanes": lanes.get(t.name, 1)})
            for t in self.config.tiers
        )
        self.config = self.config.model_copy(
            update={"hardware": hardware, "tiers": tiers, "chunk_tokens": chunk_tokens}
        )
        self.policy = Policy(self.config, step_tokens)

    def plan(self, request_info: hooks.RequestInfo) -> hooks.Plan:
        """Without the connector's view: as if the slowest tier held the whole prompt."""
        tier = self.config.tiers[-1].name
        queued = {tier: request_info.loads_queued * request_info.chunk_bytes}
        held = (Held(tier, request_info.prompt_tokens),)
        decision = self.policy.decide(
            Request(request_info.prompt_tokens, request_info.local_tokens, held, queued=queued)
        )
        return hooks.Plan(decision.load_tokens, decision.load_tokens > 0)

    def seconds_saved(self, end_tokens: int, chunk_tokens: int) -> float:
        """Prefill seconds that one stored chunk ending at `end_tokens` saves."""
        start = max(end_tokens - chunk_tokens, 0)
        return self.policy.prefill.seconds(end_tokens - start, start)

    def account(self) -> dict[str, float]:
        """Totals for metrics, by the names of `metrics`."""
        ledger = self.policy.ledger
        return {
            "cost_requests_total": ledger.requests, "cost_loads_total": ledger.loads, "cost_predicted_seconds_total": ledger.predicted_s,
            "cost_actual_seconds_total": ledger.served_s, "cost_regret_seconds_total": ledger.regret_s,
            "cost_explored_seconds_total": ledger.explored_s, "cost_probed_seconds_total": ledger.probed_s,
            "cost_missed_deadlines_total": ledger.missed_deadlines, "cost_overlapped_total": self.overlapped,
            "cost_overlaps_planned_total": self.overlaps_planned,
        }  # fmt: skip

    def load_deadline(self, request: str, default_s: float) -> float:
        """Seconds a promotion for this request may take."""
        return self.deadlines.get(request, default_s)

    def note_load(self, request: str, tier: str, nbytes: int, arrived: int, seconds: float, queued: int) -> None:
        """A promotion of `nbytes` ended; `arrived` of them passed their proof in time."""
        if request not in self.untaught:
            self.policy.fetched(tier, nbytes, seconds, queued, arrived)


class _Open(NamedTuple):
    decision: Decision | None
    at: float
    headers: Mapping[str, str] | None = None
    """W3C trace headers of the request."""


class CostConnector(DynamoBlobConnector):
    """DynamoBlobConnector that loads only what is worth loading."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role != KVConnectorRole.SCHEDULER:
            return
        assert isinstance(self._policy, CostPolicy)
        self._cost: CostPolicy = self._policy
        groups = self.scheduler.config.kv_group_configs
        full = [i for i, g in enumerate(groups) if g.sliding_window_size_in_chunks is None] or [0]
        self._group = full[0]
        self._chunk = groups[self._group].tokens_per_chunk
        # Every full-attention group has a row for every chunk; windows and states add a constant that `fixed_s` learns.
        per_token = max(1, round(sum(self._chunk_bytes / groups[i].tokens_per_chunk for i in full)))
        lanes = {t.store: t.config.threads for t in self._ours() if t.store == "blob"}
        self._cost.bind(per_token, self._chunk, vllm_config.scheduler_config.max_num_batched_tokens, lanes)
        self._per_token = per_token
        self._open: dict[str, _Open] = {}
        self._copies: dict[str, tuple[float, int]] = {}
        self._steps = Steps(self._cost.untaught)
        self._status_due = 0.0
        self._found, self._asked, self._refused = 1.0, 2.0, 0
        self._told: set[str] = set()
        self._soon: tuple[float, dict[str, Loading]] = (0.0, {})
        self._spans = open_spans("dynamo-blob-kv")

    # ---- the decision

    def _plan(self, request: EngineRequest, local: int) -> hooks.Plan:
        params: dict[str, Any] = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            return hooks.Plan(None, True)  # its KV comes by handover; `kv_load_tiers` says what else
        try:
            return self._decide(request, local, str(params.get(MODE_KEY, "auto")))
        except Exception:
            # A policy that fails must cost a chance, not the engine.
            log.exception("KV-COST: no decision for %s; recomputing", request.request_id)
            return hooks.Plan(0, False)

    def _decide(self, request: EngineRequest, local: int, mode: str) -> hooks.Plan:
        rid, now = request.request_id, time.monotonic()
        if mode != "auto":
            self._cost.untaught.add(rid)
            self._open[rid] = _Open(None, now)
            return hooks.Plan(0, False) if mode == "recompute" else hooks.Plan(None, True)
        status = self.scheduler._req_status[rid]
        held, certain = self._peek(status, local)
        policy = self._cost.policy
        arrived, loading = now - _waited(request), self._loading(now)
        found = bool(loading) or self._steps.computing_since(arrived)
        decision = policy.decide(
            Request(
                request.num_tokens, local, held, self._wait_s(), self._steps.decoding(), self._queued(),
                status.max_load_tokens, arrived, loading, certain, found,
            )
        )  # fmt: skip
        if decision.load_tokens and not certain and not self._worth_asking(decision):
            decision = policy.instead(decision, "the index does not know, and asking is not worth it")
        load = decision.load_tokens
        self._cost.overlaps_planned += decision.overlap_from is not None
        self._soon[1][rid] = Loading(decision.chosen.load.mean, decision.chosen.compute.mean)
        self._open[rid] = _Open(decision, now, request.trace_headers)
        if load:
            self._cost.deadlines[rid] = decision.deadline_s
        if decision.probe:
            self._probe(status, local, held, decision)
        dram_only = load and held and local + load <= next((h.end for h in held if h.tier == DRAM), 0)
        return hooks.Plan(load, bool(load) and not dram_only)

    def _peek(self, status: Any, local: int) -> tuple[tuple[Held, ...], bool]:
        """What the tiers hold beyond `local`, by their indexes; False = the index does not know (it counts as held)."""
        status.update_offload_keys()
        keys = status.group_states[self._group].offload_keys
        first = local // self._chunk
        manager, context = self.scheduler.manager, status.req_context
        primary = getattr(manager, "primary_tier", None)
        spans: list[Held] = []
        at = first
        while primary is not None and at < len(keys) and primary.lookup(keys[at], context) is not LookupResult.MISS:
            at += 1
        if at > first:
            spans.append(Held(DRAM, at * self._chunk))
        certain = True
        for tier in self._ours():
            if not context.load_tier_filter.allows(tier.medium, tier.locality):
                continue
            start = at
            while at < len(keys):
                there = tier.peek(keys[at], context)
                if there is False:
                    break
                if there is None and certain:
                    certain = False
                at += 1
            if at > start:
                spans.append(Held(tier.store, at * self._chunk))
        return tuple(spans), certain

    def _worth_asking(self, decision: Decision) -> bool:
        """An index that does not know may send a cold prompt to the store: asked only when the odds pay for it, and now and
        then all the same: who never asks does not hear that the odds have changed."""
        odds = self._found / self._asked
        gain = decision.compute.total_s - decision.chosen.total_s
        ask = min(f.fixed_s for f in self._cost.policy.fetches.values() if f.prior.via) if self._has_store() else 0.0
        worth = odds * gain > (1 - odds) * ask or self._refused >= _REFUSALS
        self._refused = 0 if worth else self._refused + 1
        return worth

    def _has_store(self) -> bool:
        return any(f.prior.via for f in self._cost.policy.fetches.values())

    def _probe(self, status: Any, local: int, held: tuple[Held, ...], decision: Decision) -> None:
        """Promote a few chunks in the background: `lookup` of a chunk that is there starts it."""
        assert decision.probe is not None
        start = local
        for span in held:
            if span.tier == decision.probe.tier:
                break
            start = span.end
        keys = status.group_states[self._group].offload_keys
        for key in keys[start // self._chunk : (start + decision.probe.tokens) // self._chunk]:
            if self.scheduler.manager.lookup(key, status.req_context) is LookupResult.MISS:
                break

    # ---- what a worker can see

    def _wait_s(self) -> float:
        prefill = self._cost.policy.prefill
        return sum(prefill.seconds(tokens, start) for tokens, start in self._steps.left())

    def _loading(self, now: float) -> tuple[Loading, ...]:
        """Requests decided and not scheduled yet, most because they load. Looked up once for all that one step decides."""
        if now - self._soon[0] > _SAME_STEP_S:
            found = {
                rid: Loading(max(o.at + o.decision.chosen.load.mean - now, 0.0), o.decision.chosen.compute.mean)
                for rid, o in self._open.items()
                if o.decision
            }
            self._soon = (now, found)
        return tuple(one for rid, one in self._soon[1].items() if rid in self._open and not self._steps.began(rid))

    def _queued(self) -> dict[str, int]:
        return {t.store: t.loading_bytes for t in self._ours()}

    def _ours(self) -> list[DynamoBlobTier]:
        tiers = getattr(self.scheduler.manager, "secondary_tiers", ())
        return [t for t in tiers if isinstance(t, DynamoBlobTier)]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        with _never_ends_the_engine():
            self._steps.scheduled(scheduler_output)
        with _never_ends_the_engine():
            for rid in scheduler_output.finished_req_ids:
                self._forget(rid)
            if self._cost.status_file and time.monotonic() >= self._status_due:
                self._write_status()
        return super().build_connector_meta(scheduler_output)

    def update_state_after_alloc(self, request: EngineRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        rid = request.request_id
        opened = self._open.get(rid)
        asked = opened and opened.decision and opened.decision.load_tokens and rid in self._cost.deadlines
        if asked and rid not in self._told:  # vLLM says it again, without tokens, when the load is there
            self._told.add(rid)
            self._found = self._found * 0.95 + (num_external_tokens > 0)
            self._asked = self._asked * 0.95 + 1
        if num_external_tokens and rid not in self._cost.untaught:
            self._copies[rid] = (time.monotonic(), num_external_tokens * self._per_token)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        now = time.monotonic()
        with _never_ends_the_engine():
            for rid in connector_output.finished_recving or ():
                copied = self._copies.pop(rid, None)
                # Beside a forward pass it would measure the pass.
                if copied and not self._steps.computing_since(copied[0]):
                    self._cost.policy.fetched(DRAM, copied[1], now - copied[0])
        super().update_connector_output(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """vLLM asks once for every output it handles, in the order of the steps; for some steps it says nothing else."""
        now = time.monotonic()
        with _never_ends_the_engine():
            if over := self._steps.over(now):
                step, seconds = over
                for rid in step.ends:
                    self._first_token(rid, now)
                if step.tokens >= _LEAST_TOKENS and step.teach:
                    self._cost.policy.prefill.observe_step(step.tokens, step.pairs, step.reach, seconds, step.decoding)
        return super().take_events()

    def _first_token(self, rid: str, now: float) -> None:
        opened = self._open.pop(rid, None)
        self._cost.deadlines.pop(rid, None)
        if opened and opened.decision:
            outcome = self._cost.policy.finished(opened.decision, now - opened.at)
            if self._spans:
                came_of_it = {
                    "kv.cost.actual_s": outcome.actual_s,
                    "kv.cost.regret_s": outcome.regret_s,
                    "request.id": rid,
                }
                self._spans.record(
                    "kv.cost", outcome.actual_s, opened.decision.attributes() | came_of_it, opened.headers
                )

    def _forget(self, rid: str) -> None:
        self._open.pop(rid, None)
        self._steps.forget(rid)
        self._copies.pop(rid, None)
        self._told.discard(rid)
        self._cost.deadlines.pop(rid, None)
        self._cost.untaught.discard(rid)

    def shutdown(self) -> None:
        """Spans of the last second are sent, within a bound."""
        super().shutdown()
        if self.connector_scheduler is not None and self._spans:
            self._spans.close()

    def _write_status(self) -> None:
        self._status_due = time.monotonic() + _STATUS_S
        part = f"{self._cost.status_file}.{os.getpid()}"
        try:
            with open(part, "w") as f:
                json.dump(_finite(self._cost.policy.explain()), f)
            os.replace(part, self._cost.status_file)
        except OSError as e:
            log.warning("the cost status file cannot be written: %s", e)


@contextmanager
def _never_ends_the_engine() -> Iterator[None]:
    """Around our own account: whatever is wrong with it costs a measurement, not the engine."""
    try:
        yield
    except Exception:
        log.exception("KV-COST: a measurement is lost")


def _waited(request: EngineRequest) -> float:
    """Seconds since the request came; decisions of one step come together, arrivals do not."""
    return max(0.0, time.time() - request.arrival_time)


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value
