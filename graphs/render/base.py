"""What every renderer is given, and what it must hold.

A renderer turns pods (`Pod`, collapsed from the plan by `graphs.render.pods`) into the deployment object of
one API version. Contract:

- It reads the plan and nothing else: argv, environment, configuration, ports, volumes, identities and
  deadlines stand in it as they will run. A renderer adds only what a cluster needs and one machine has not
  (`graphs.render.pods.CLUSTER_ENV`, probes in the cluster's form, security contexts).
- The same plan gives the same objects in the same order: no clock, no random names, no machine paths.
- It holds no secret; names of Secrets at most.
- What it cannot express it refuses with a RENDER-* error; it never leaves a setting out in silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from graphs.plan import Plan, Process

Manifest = dict[str, Any]

PREFIX = "dynamo-blob.io"
GRAPH_LABEL, COMPONENT_LABEL = "app.kubernetes.io/part-of", "app.kubernetes.io/component"
MANAGED_LABEL = ("app.kubernetes.io/managed-by", "dynamo-blob")
WORKERS = ("prefill", "decode", "aggregated")


@dataclass(frozen=True)
class Pod:
    """All replicas of one component: one template."""

    name: str
    kind: Literal["frontend", "worker", "prefill", "decode", "node"]
    """Type in the operator's terms; `node` = one per node, outside the operator's object."""
    replicas: int
    main: Process
    sidecars: tuple[Process, ...] = ()
    """Start before `main` and end after it."""
    service_account: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    spec: Manifest = field(default_factory=dict)
    """Kubernetes PodSpec, complete."""
    shm_bytes: int = 0

    @property
    def main_container(self) -> Manifest:
        found: Manifest = next(c for c in self.spec["containers"] if c["name"] == "main")
        return found


class Renderer(Protocol):
    api: str

    def deployment(self, plan: Plan, pods: list[Pod]) -> Manifest:
        """The DynamoGraphDeployment of `pods`. Raises RENDER-* where this API version cannot say it."""


def labels(plan: Plan, component: str = "") -> dict[str, str]:
    own = {COMPONENT_LABEL: component} if component else {}
    return {GRAPH_LABEL: plan.graph, **own, MANAGED_LABEL[0]: MANAGED_LABEL[1]}


def metadata(plan: Plan, name: str, component: str = "", namespaced: bool = True, **more: Any) -> Manifest:
    assert plan.cluster is not None
    where = {"namespace": plan.cluster["namespace"]} if namespaced else {}
    return {"name": name, **where, "labels": labels(plan, component), **more}
