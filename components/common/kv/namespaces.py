"""The namespaces of a running engine: one per cache group."""

from __future__ import annotations

from typing import Any

from components.common.errors import DynamoBlobError
from components.common.kv.keys import Namespace


def namespaces_of(spec: Any, row_bytes: int) -> dict[int, Namespace]:
    """One namespace per cache group, from what the connector left in the spec's extra_config."""
    seen = spec.extra_config.get("dynamo_blob")
    if not seen:
        raise DynamoBlobError(
            "KV-CONNECTOR", "the KV tier needs its own connector", why="kv_connector is not DynamoBlobConnector",
            do="build kv_transfer_config with components.common.kv.build",
        )  # fmt: skip
    parallel = spec.config.parallel
    return {
        group.group_id: Namespace(
            weights_digest=seen["weights_digest"],
            engine_version=seen["engine_version"],
            platform=seen["platform"],
            layout=str(spec.config.kv_cache_layout),
            group=seen["groups"][group.group_id],
            dtype=spec.config.model.dtype,
            tokens_per_block=group.tokens_per_block,
            tokens_per_chunk=group.tokens_per_block * spec.blocks_per_chunk,
            row_bytes=row_bytes,
            parallel=f"tp{parallel.tp_size}.pp{parallel.pp_size}.pcp{parallel.pcp_size}.dcp{parallel.dcp_size}",
            hash_algorithm=seen["hash_algorithm"],
            hash_seed=seen["hash_seed"],
        )
        for group in spec.config.groups
    }
