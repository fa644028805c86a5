"""What changes between two plans, field by field; run directories and state directories count as equal."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from graphs.plan import Plan


class Change(NamedTuple):
    """`path` is like processes.decode-0.config.engine.block_size; `old` or `new` is None where there is no value."""

    path: str
    old: Any
    new: Any


def normal(plan: Plan) -> dict[str, Any]:
    """The plan as data with processes by name, and without what only says where it runs."""
    data: dict[str, Any] = plan.model_dump(mode="json")
    replace = [(data["shm_dir"], "<shm>"), (data["run_dir"], "<run>")] if data["run_dir"] else []
    state = data["run_dir"].rpartition("/runs/")[0]
    if state:
        replace.append((state, "<state>"))
    data = _replace(data, replace)
    data["processes"] = {p["name"]: p for p in data["processes"]}
    data["order"] = list(data["processes"])
    data.pop("source")
    return data


def diff(old: Plan, new: Plan) -> list[Change]:
    return _diff(normal(old), normal(new), "")


def _replace(value: Any, pairs: list[tuple[str, str]]) -> Any:
    if isinstance(value, dict):
        return {k: _replace(v, pairs) for k, v in value.items()}
    if isinstance(value, list):
        return [_replace(v, pairs) for v in value]
    if isinstance(value, str):
        for a, b in pairs:
            value = re.sub(rf"(?<![\w>]){re.escape(a)}(?![\w-])", b, value)
    return value


def _diff(old: Any, new: Any, path: str) -> list[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [c for k in keys for c in _diff(old.get(k), new.get(k), f"{path}.{k}" if path else str(k))]
    return [] if old == new else [Change(path, old, new)]
