"""A handover whose lease may be over is not read.

vLLM's prefill worker frees blocks that nobody pulled within the lease (30 s; the decode worker renews it once it
knows the request). A decode worker that gets the request later still reads those blocks, one-sided, with whatever
request owns them by then: a wrong answer served as success (measured: case 30). So prefill stamps what it offers,
and decode computes itself what arrives past half of the lease.

vLLM chooses behaviour by the name "NixlConnector", so the class is amended in place instead of subclassed.
Clocks of the two workers must agree within half of the lease (15 s by default).
"""

from __future__ import annotations

import logging
import time
from typing import Any

log = logging.getLogger(__name__)

OFFERED, LEASE = "offered_at", "lease_s"
_LEASE_S = 30.0
stale = 0
"""Handovers refused in this process."""


def stamp(params: dict[str, Any] | None, lease_s: float, now: float) -> dict[str, Any] | None:
    """What a prefill worker offers, with when and for how long."""
    if params is None or not params.get("do_remote_prefill"):
        return params
    return {**params, OFFERED: now, LEASE: lease_s}


def too_late(params: dict[str, Any] | None, now: float) -> bool:
    """Whether an offer may not be pulled any more; one without a stamp cannot be told and counts as late."""
    if not params or not params.get("do_remote_prefill"):
        return False
    offered = params.get(OFFERED)
    return offered is None or abs(now - float(offered)) > float(params.get(LEASE, _LEASE_S)) / 2


def install() -> None:
    """Amend vLLM's NixlConnector in this process; a second call changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector

    Connector: Any = NixlBaseConnector
    if getattr(Connector, "_dynamo_blob_leased", False):
        return
    plain, grouped, new = Connector.request_finished, Connector.request_finished_all_groups, Connector.on_new_request

    def lease(self: Any) -> float:
        return float(getattr(self.connector_scheduler, "_kv_lease_duration", _LEASE_S))

    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        delay, params = plain(self, request, block_ids)
        return delay, stamp(params, lease(self), time.time())

    def request_finished_all_groups(self: Any, request: Any, block_ids: Any) -> Any:
        delay, params = grouped(self, request, block_ids)
        return delay, stamp(params, lease(self), time.time())

    def on_new_request(self: Any, request: Any) -> None:
        global stale
        if too_late(request.kv_transfer_params, time.time()):
            stale += 1
            log.warning("KV-HANDOVER-EXPIRED: %s came past half of its lease; computed here", request.request_id)
            request.kv_transfer_params["do_remote_prefill"] = False
        new(self, request)

    Connector.request_finished = request_finished
    Connector.request_finished_all_groups = request_finished_all_groups
    Connector.on_new_request = on_new_request
    Connector._dynamo_blob_leased = True
