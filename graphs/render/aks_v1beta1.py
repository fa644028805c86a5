"""DynamoGraphDeployment nvidia.com/v1beta1: the operator's storage version. Components are a list of pod templates."""

from __future__ import annotations

import math

from components.common.errors import DynamoBlobError
from graphs.plan import Plan
from graphs.render import base
from graphs.render.base import Manifest, Pod, metadata
from graphs.render.pods import MIB, plan_digest

MAX_COMPONENTS = 25


class V1Beta1:
    api = "nvidia.com/v1beta1"

    def deployment(self, plan: Plan, pods: list[Pod]) -> Manifest:
        assert plan.cluster is not None
        components = [self.component(plan, pod) for pod in pods if pod.kind != "node"]
        if len(components) > MAX_COMPONENTS:
            raise DynamoBlobError(
                "RENDER-TOO-MANY",
                f"{len(components)} components; the operator takes {MAX_COMPONENTS}",
                where=plan.source,
            )
        return {
            "apiVersion": self.api,
            "kind": "DynamoGraphDeployment",
            "metadata": metadata(plan, plan.graph, annotations=graph_annotations(plan)),
            "spec": {"backendFramework": "vllm", "components": components},
        }

    def component(self, plan: Plan, pod: Pod) -> Manifest:
        assert plan.cluster is not None
        out: Manifest = {
            "name": pod.name,
            "type": pod.kind,
            "replicas": pod.replicas,
            # Our tags carry no Dynamo version; admission of the operator demands it then.
            "runtimeVersionOverride": plan.cluster["dynamo_version"],
        }
        if pod.shm_bytes:
            out["sharedMemorySize"] = f"{math.ceil(pod.shm_bytes / MIB)}Mi"
        template = {"labels": pod.labels, "annotations": pod.annotations}
        return {**out, "podTemplate": {"metadata": template, "spec": pod.spec}}


def graph_annotations(plan: Plan) -> dict[str, str]:
    """What the operator reads, and what a reader of the cluster wants to know."""
    return {
        "nvidia.com/dynamo-discovery-backend": plan.discovery,
        f"{base.PREFIX}/plan-digest": plan_digest(plan),
        f"{base.PREFIX}/manifest-digest": plan.release["manifest_digest"],
    }
