"""What rules see, and how a rule says something.

A rule is a function ``(Context) -> Iterator[Finding]``. It reports what is wrong, why it would fail or
answer wrongly, and the fix; it never raises for a bad graph. Rules are independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from components.common.kv.config import KvTiersConfig
from graphs.load import Finding, Graph
from graphs.plan import Plan
from graphs.pools import Worker
from graphs.spec import GraphSpec

Rule = Callable[["Context"], Iterator[Finding]]


@dataclass(frozen=True)
class Context:
    """A typed graph, its merged workers, and the local plan."""

    graph: Graph
    workers: tuple[Worker, ...]
    plan: Plan

    @property
    def spec(self) -> GraphSpec:
        return self.graph.spec

    @property
    def for_cluster(self) -> bool:
        """Every replica is a pod with its own address: nothing about ports and slots of one machine applies."""
        return self.spec.cluster is not None or self.spec.runtime.discovery == "kubernetes"

    @cached_property
    def linked(self) -> tuple[Worker, Worker] | None:
        """Prefill and decode, when KV goes from one to the other."""
        by_role = {w.role: w for w in self.workers}
        return (by_role["prefill"], by_role["decode"]) if {"prefill", "decode"} <= by_role.keys() else None

    def engine_place(self, worker: Worker, key: str) -> str:
        """Where an engine setting of one worker stands: its own line, the graph's, or the profile's name."""
        for path in (("components", worker.role, "engine", key), ("engine", "set", key), ("engine", "profile")):
            if path in self.graph.document.marks or path in self.graph.document.origins:
                return self.graph.document.place(path)
        return self.graph.place("components", worker.role)

    def kv_path(self, worker: Worker) -> tuple[str, ...]:
        return ("components", worker.role, "kv") if worker.spec.kv else ("kv",)

    def kv_place(self, worker: Worker, key: str = "") -> str:
        path = (*self.kv_path(worker), "set", key)
        return self.graph.document.place(path if key else path[:-2])

    def tiers(self, worker: Worker) -> KvTiersConfig | None:
        """The worker's tier settings as its own model; None without tiers or when they are invalid (another rule says so)."""
        if worker.kv is None:
            return None
        process = next((p for p in self.plan.processes if p.component == worker.role), None)
        if process is None or process.config is None:
            return None
        try:
            return KvTiersConfig.model_validate(process.config["kv"]["settings"])
        except ValueError:
            return None


def kib(n: float) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n:.0f} B"
