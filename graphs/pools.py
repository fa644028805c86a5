"""The worker pools of a graph, with everything that profiles, the graph and a component say of them merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from components.common.engine.config import EngineArgs
from graphs.load import Graph
from graphs.profiles import EngineProfile, engine_args, merged_kv, read_engine_profile, read_kv_profile
from graphs.spec import KvSpec, WorkerSpec, parse_size

ROLES = ("prefill", "decode", "aggregated")


@dataclass(frozen=True)
class Worker:
    """One pool of workers with everything that was merged for it."""

    role: str
    spec: WorkerSpec
    profile: EngineProfile
    args: EngineArgs
    kv: dict[str, Any] | None


def workers_of(graph: Graph) -> list[Worker]:
    """The worker pools of a graph, settings merged. Raises PROFILE-*, ENGINE-* with the guilty line."""
    spec = graph.spec
    profile, document = read_engine_profile(spec.engine.profile, graph.place("engine", "profile"))
    out = []
    for role in ROLES:
        worker: WorkerSpec | None = getattr(spec.components, role)
        if worker is None:
            continue
        layers = [
            (profile.engine, document, ("engine",)), (spec.engine.set, graph.document, ("engine", "set")),
            (worker.engine, graph.document, ("components", role, "engine")),
        ]  # fmt: skip
        kv, where = (worker.kv, ("components", role, "kv")) if worker.kv else (spec.kv, ("kv",))
        out.append(Worker(role, worker, profile, engine_args(layers), _kv_settings(graph, kv, where)))
    return out


def _kv_settings(graph: Graph, kv: KvSpec | None, where: tuple[str, ...]) -> dict[str, Any] | None:
    if kv is None:
        return None
    profile, _ = read_kv_profile(kv.profile, graph.place(*where, "profile"))
    return merged_kv(profile, kv.set, graph.place(*where, "profile"), overlap=kv.overlap)


def host_tier_bytes(settings: dict[str, Any] | None) -> int:
    """DRAM of the KV tiers of one worker: primary tier and staging, bytes."""
    if not settings:
        return 0
    return sum(_int(settings.get(k, 0)) for k in ("dram_bytes", "staging_bytes"))


def size_or_as_it_is(size: object) -> object:
    """Bytes where `size` is one; a wrong size stays as it is, for `check` to report with its line."""
    try:
        return parse_size(size)
    except ValueError:
        return size


def _int(size: object) -> int:
    value = size_or_as_it_is(size)
    return value if isinstance(value, int) else 0
