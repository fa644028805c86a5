"""A tier's counters in words: why there are no hits. Reads what `DynamoBlobTier.status` writes; imports nothing of vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REASONS = {
    "absent": "never stored, or gone",
    "breaker": "the store is not asked while its breaker is open",
    "lookup_late": "the store did not say in time whether the chunk is there",
    "lookup_unknown": "the store could not say whether the chunk is there",
    "generation_unknown": "the tenant's purge generation cannot be read",
    "ephemeral": "a retention class that never leaves HBM and DRAM",
    "tenant_invalid": "the request's tenant is not one",
    "failed_before": "a load for the same request failed",
}
"""Why a lookup was a miss (metric `misses`, label `reason`)."""

DOUBTS = ("format", "length", "tenant", "namespace", "key", "digest")
_SHOWN = 3


def files(status_file: str) -> list[Path]:
    """Where a worker's tiers write: one file, or one per tier when there are two."""
    return [Path(status_file), *(Path(f"{status_file}.{store}") for store in ("posix", "blob"))] if status_file else []


def read(status_file: str) -> list[dict[str, Any]]:
    """What the tiers of a worker said last; empty before the first step, or when nothing readable is there."""
    out = []
    for path in files(status_file):
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and all(
            isinstance(found.get(k), dict) for k in ("ends", "misses", "stores", "transport")
        ):
            out.append(found)
    return out


def hits(status: Mapping[str, Any]) -> int:
    """Chunks that came from the tier."""
    return int(status["ends"].get("load_ok", 0))


def why_no_hits(status: Mapping[str, Any]) -> list[str]:
    """Short sentences, the most telling first; empty while there are hits and nothing is wrong, or nothing was asked for."""
    transport, misses, out = status.get("transport", {}), status.get("misses", {}), []
    if transport.get("container_ok", 1) == 0:
        out.append("the container is missing or cannot be used")
    for way in ("read", "write"):
        if transport.get(f"{way}_breaker_open"):
            out.append(f"{way}s are off: the store failed too often and is probed in the background")
    if status.get("tenants_file"):
        out.append(f"the tenants file is not in force as it stands: {status['tenants_file']}")
    if misses.get("generation_unknown") and not hits(status):
        out.append(REASONS["generation_unknown"])
    if hits(status):
        return out
    out += [f"a namespace beside ours differs in {differences(o)}" for o in status.get("other_namespaces", [])[:_SHOWN]]
    loads = {k.removeprefix("load_"): n for k, n in status["ends"].items() if k.startswith("load_")}
    out += [f"{n} objects were not what their name promises ({k})" for k, n in loads.items() if k in DOUBTS]
    if misses and not out:
        reason = max(misses, key=lambda k: misses[k])
        out.append(REASONS.get(reason, reason))
    return out


def differences(other: Mapping[str, Any]) -> str:
    """`dtype (float32 here, bfloat16 there), ...` of a namespace that is not ours."""
    out = []
    for name, values in list(other.get("differs", {}).items())[:_SHOWN]:
        out.append(
            f"{name} ({_short(values['here'])} here, {_short(values['there'])} there)"
            if isinstance(values, dict)
            else f"{name} ({values})"
        )
    return ", ".join(out) or "nothing this version knows"


def summary(status: Mapping[str, Any]) -> str:
    """One line: hits, misses by reason, stores, what is dropped, breaker."""
    misses, stores = status.get("misses", {}), status.get("stores", {})
    dropped = {k.removeprefix("store_dropped_"): n for k, n in stores.items() if k.startswith("store_dropped_")}
    failed = {k.removeprefix("load_"): n for k, n in status["ends"].items() if k.startswith("load_") and k != "load_ok"}
    parts = [
        f"{hits(status)} chunks hit",
        f"{sum(misses.values())} missed{_by(misses)}",
        *([f"{sum(failed.values())} loads not used{_by(failed)}"] if failed else []),
        f"{status['ends'].get('store_ok', 0)} stored",
        *([f"{sum(dropped.values())} not stored{_by(dropped)}"] if dropped else []),
    ]
    open_ = [w for w in ("read", "write") if status.get("transport", {}).get(f"{w}_breaker_open")]
    return ", ".join(parts) + f"; breaker {'OPEN for ' + ' and '.join(open_) if open_ else 'closed'}"


def _by(counts: Mapping[str, int]) -> str:
    top = sorted(counts.items(), key=lambda kv: -kv[1])
    return f" ({', '.join(f'{k} {n}' for k, n in top)})" if top else ""


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:16]}…"
