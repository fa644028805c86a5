"""What the KV tiers are told about one request, inside kv_transfer_params."""

from __future__ import annotations

import logging
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.messages import loadplan
from components.common.messages import salt as salts

log = logging.getLogger("dynamo_blob.worker")


def tier_params(role: str, metadata: Any, salt: str | None, remote_kv: bool) -> dict[str, Any]:
    """Tenant and class from the composed salt, and the router's load plan.

    metadata   `context.metadata` of the request, where the load plan travels
    remote_kv  the prompt's KV comes by handover: nothing is looked up

    A plan that cannot be read is no plan: the engine decides.
    """
    from components.common.kv.build import kv_params_for

    plan: dict[str, Any] = {}
    try:
        read = loadplan.read(metadata)
        plan = {k: v for k, v in read.model_dump(mode="json").items() if v is not None}
    except DynamoBlobError as e:
        log.warning("%s", e)
    return kv_params_for(role, {"kv_plan": plan}, salts.parse(salt) if salts.parse(salt) else salt, remote_kv)
