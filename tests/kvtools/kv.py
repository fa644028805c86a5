"""Configurations and comparisons of the KV promises."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from components.common.kv.build import kv_transfer_config, scheduler_args
from components.common.kv.keys import parse_name
from components.common.kv.objects import HEADER_BYTES
from tests.kvtools.azure import Store

DIGEST = "ab" * 32
CONTAINER = "kvtest"


def settings(store: Store | None = None, *, port: int | None = None, **more: Any) -> dict[str, Any]:
    """KvTiersConfig for a tiny model; with a Blob tier when `store` is given (through a proxy at `port`)."""
    out: dict[str, Any] = {
        "dram_bytes": 32 << 20, "staging_bytes": 8 << 20, "weights_digest": DIGEST, "threads": 8, "lookup_deadline_s": 2.0,
        "load_deadline_s": 10.0, "store_deadline_s": 20.0, "breaker_open_s": 0.3, "breaker_max_open_s": 1.0,
        "epochs_refresh_s": 1.0, "epochs_stale_s": 60.0,
    }  # fmt: skip
    if store is not None:
        out |= {"account": store.account_config(port).model_dump(mode="json"), "container": CONTAINER}
    return out | more


def engine_args(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"dtype": "float32", "kv_transfer_config": kv_transfer_config(config), **scheduler_args(config), **more}


def chunks(store: Store, container: str = CONTAINER) -> list[str]:
    """Names of the chunks in the container, oldest first."""
    found = [b for b in store.account().list(container) if parse_name(b.name)]
    return [b.name for b in sorted(found, key=lambda b: b.modified)]


def wait_stored(store: Store, n: int, timeout: float = 20.0) -> list[str]:
    from tests.kvtools.proxy import wait_for

    wait_for(lambda: len(chunks(store)) >= n, timeout, f"{n} chunks in the store, {len(chunks(store))} are")
    return chunks(store)


def wait_stored_in(store: Store, container: str, n: int, timeout: float = 30.0) -> list[str]:
    from tests.kvtools.proxy import wait_for

    wait_for(lambda: len(chunks(store, container)) >= n, timeout, f"{n} chunks in {container}", every=0.1)
    return chunks(store, container)


def same(got: dict[str, Any], want: dict[str, Any]) -> bool:
    """Tokens, and top-5 logprobs of every position, bit for bit."""
    return bool(got["tokens"] == want["tokens"] and got["logprobs"] == want["logprobs"])


def band(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest difference of a logprob both list, over the positions whose earlier tokens agree."""
    worst = 0.0
    for i, (x, y) in enumerate(zip(a["logprobs"], b["logprobs"], strict=True)):
        if a["tokens"][:i] != b["tokens"][:i]:
            break
        mine, theirs = dict(map(tuple, x)), dict(map(tuple, y))
        if not mine.keys() & theirs.keys():
            return float("inf")
        for token in mine.keys() & theirs.keys():
            difference = abs(mine[token] - theirs[token])
            worst = max(worst, float("inf") if math.isnan(difference) else difference)
    return worst


def flip(data: bytes, layer: int, layers: int, bit: int = 0x40) -> bytes:
    """One byte changed in one layer of a chunk: the highest byte of a float in the middle of the layer's page."""
    row = len(data) - HEADER_BYTES
    page = row // layers
    at = HEADER_BYTES + layer * page + page // 2 // 4 * 4 + 3
    return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


def fresh_dir(root: Path, name: str) -> str:
    path = root / name
    path.mkdir()
    return str(path)
