"""vLLM's OffloadingConnector with a refusal of unproven layouts and a say in what is loaded."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import TierFilter

from components.common.errors import DynamoBlobError
from components.common.kv import ending, hooks, leased, pacing
from components.common.kv.config import KvTiersConfig
from components.common.kv.keys import PUBLIC
from components.common.kv.layouts import check_config, check_groups, describe_groups
from components.common.kv.observed import Dram, Observed, source_of
from components.common.kv.shm import sweep

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

leased.install()

_HEX = re.compile(r"^[0-9a-f]{32,}$")


class DynamoBlobConnector(OffloadingConnector):
    """Configured by `components.common.kv.build`; extra_config["settings"] is the KvTiersConfig."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = KvTiersConfig.parse(extra["settings"], where="kv")
        check_config(vllm_config, bool(current_platform.is_cpu()))
        check_groups(vllm_config, kv_cache_config)
        extra["dynamo_blob"] = {
            "weights_digest": weights_digest(config, vllm_config.model_config.model),
            "engine_version": vllm.__version__,
            "platform": "cpu" if current_platform.is_cpu() else str(current_platform.device_name),
            "groups": describe_groups(kv_cache_config),
            "hash_algorithm": vllm_config.cache_config.prefix_caching_hash_algo,
            "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        }
        if role == KVConnectorRole.SCHEDULER:
            ending.install()
            removed = sweep()
            if removed:
                log.info("removed shared memory of killed engines: %s", ", ".join(removed))
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._policy = hooks.install(config.policy)
            self._plans: dict[str, hooks.Plan] = {}
            self._chunk_bytes = int(self._kv_bytes())
            primary = getattr(self.scheduler.manager, "primary_tier", None)
            # in a pipeline a step that schedules nothing says nothing about what is computed
            if vllm_config.parallel_config.pipeline_parallel_size == 1:
                pacing.install(getattr(self.scheduler.manager, "secondary_tiers", ()), self.must_step)
            self._observed = Observed(Dram(primary, self._chunk_bytes) if primary is not None else None)

    def must_step(self) -> bool:
        """Whether only a step sees what comes next: copies between HBM and DRAM, over in milliseconds."""
        return bool(self.scheduler._jobs)

    def _kv_bytes(self) -> int:
        primary = getattr(self.scheduler.manager, "primary_tier", None)
        view = primary.get_kv_memoryview() if primary is not None else None
        return view.strides[0] if view is not None and view.strides else 0

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        plan = self._plans.get(request.request_id)
        if plan is None:
            plan = self._plans[request.request_id] = self._plan(request, num_computed_tokens)
            self._apply(request, plan)
        tokens, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is not None and request.num_output_tokens == 0:
            self._observed.first.begun(request, self._source(request, num_computed_tokens, tokens))
        return tokens, later

    def _source(self, request: Request, local: int, external: int) -> str:
        context = self.scheduler._req_status[request.request_id].req_context
        tiers = getattr(self.scheduler.manager, "secondary_tiers", ())
        promoted = [t.store for t in tiers if hasattr(t, "delivered") and t.delivered(context)]
        return source_of(local, external, promoted, bool((request.kv_transfer_params or {}).get("do_remote_prefill")))

    def get_kv_connector_stats(self) -> Any:
        stats = super().get_kv_connector_stats()
        return stats if self.connector_scheduler is None else self._observed.take(stats)

    def has_pending_push_work(self) -> bool:
        """Whether the engine goes on stepping without requests. Not once it is to end: chunks under way have their time in `shutdown`."""
        return not ending.told and super().has_pending_push_work()

    def _plan(self, request: Request, local: int) -> hooks.Plan:
        """Asked once per request: a decision that changed while the request waits would waste both ways."""
        params: dict[str, Any] = request.kv_transfer_params or {}
        group = self.scheduler.config.kv_group_configs[0]
        return self._policy.plan(
            hooks.RequestInfo(
                request_id=request.request_id,
                prompt_tokens=request.num_tokens,
                local_tokens=local,
                chunk_tokens=group.tokens_per_chunk,
                chunk_bytes=self._chunk_bytes,
                tenant=str(params.get("tenant", PUBLIC)),
                cls=str(params.get("class", "")),
                loads_queued=sum(
                    t._mover.queued_loads
                    for t in getattr(self.scheduler.manager, "secondary_tiers", ())
                    if hasattr(t, "_mover")
                ),
            )
        )

    def _apply(self, request: Request, plan: hooks.Plan) -> None:
        """A plan can only narrow what the router's plan (kv_transfer_params) allows."""
        status = self.scheduler._req_status[request.request_id]
        if plan.load_tokens is not None:
            cap = status.max_load_tokens
            status.max_load_tokens = plan.load_tokens if cap is None else min(cap, plan.load_tokens)
        if not plan.secondary:
            status.req_context.load_tier_filter = TierFilter(matchers=())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._plans.pop(request.request_id, None)
        self._observed.first.ended(request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._plans.pop(request.request_id, None)
        self._observed.first.ended(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


def weights_digest(config: KvTiersConfig, model_path: str) -> str:
    """Digest of the weights: configured, or the last part of the model's path (releases live in <root>/<digest>)."""
    digest = config.weights_digest or Path(model_path).name
    if not _HEX.match(digest):
        raise DynamoBlobError(
            "KV-NO-WEIGHTS-DIGEST", "the KV tiers need the digest of the weights", where=model_path,
            why="without it two releases under one name would share KV", do="set kv.weights_digest, or serve from <root>/<digest>",
        )  # fmt: skip
    return digest
