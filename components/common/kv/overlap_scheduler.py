"""vLLM's scheduler with one hook: a request whose front has met its tail is preempted once (see `overlap`).

Everything private that this leans on stands here and in `tests/unit/test_kv_overlap.py`, which fails when it moves;
written for vLLM 0.31.0 without async scheduling.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from components.common.kv.overlap import OverlapConnector


class OverlapScheduler(Scheduler):
    """Named by `build.scheduler_args` when a graph says `kv.overlap`."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        connector = overlap_of(self.connector)
        if connector is None:
            return super().schedule(*args, **kwargs)
        for request in connector.jumping(list(self.running)):
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        most, step = self.max_num_scheduled_tokens, connector.step_tokens()
        self.max_num_scheduled_tokens = min(most, step or most)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = most


def overlap_of(connector: Any) -> OverlapConnector | None:
    """Ours, alone or inside MultiConnector."""
    for one in getattr(connector, "_connectors", (connector,)):
        if isinstance(one, OverlapConnector):
            return one
    return None
