"""What the KV tiers are told about one request, inside kv_transfer_params."""

from __future__ import annotations

from typing import Any

from components.common.messages import salt as salts


def tier_params(role: str, request: dict[str, Any], salt: str | None, remote_kv: bool) -> dict[str, Any]:
    """Tenant and class from the composed salt; the router's load plan; no lookups when the KV comes by handover."""
    from components.common.kv.build import kv_params_for

    return kv_params_for(role, request, salts.parse(salt), remote_kv)
