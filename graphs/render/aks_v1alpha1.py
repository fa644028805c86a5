"""DynamoGraphDeployment nvidia.com/v1alpha1 (deprecated, still served): for clusters with an older operator.

Components are a map `services`; the pod's own part is `extraPodSpec`, the container `main` is `mainContainer`.
"""

from __future__ import annotations

import math

from graphs.plan import Plan
from graphs.render.aks_v1beta1 import graph_annotations
from graphs.render.base import Manifest, Pod, metadata
from graphs.render.pods import MIB

SUB_COMPONENT = {"prefill": "prefill", "decode": "decode"}


class V1Alpha1:
    api = "nvidia.com/v1alpha1"

    def deployment(self, plan: Plan, pods: list[Pod]) -> Manifest:
        services = {pod.name: self.service(plan, pod) for pod in pods if pod.kind != "node"}
        return {
            "apiVersion": self.api,
            "kind": "DynamoGraphDeployment",
            "metadata": metadata(plan, plan.graph, annotations=graph_annotations(plan)),
            "spec": {"backendFramework": "vllm", "services": services},
        }

    def service(self, plan: Plan, pod: Pod) -> Manifest:
        main = dict(pod.main_container)
        main.pop("name")
        env, resources = main.pop("env"), main.pop("resources", {})
        rest = {k: v for k, v in pod.spec.items() if k != "containers"}
        out: Manifest = {
            # `prefill` and `decode` are no component types of this version: they are kinds of worker.
            "componentType": "frontend" if pod.kind == "frontend" else "worker",
            **({"subComponentType": SUB_COMPONENT[pod.kind]} if pod.kind in SUB_COMPONENT else {}),
            "replicas": pod.replicas,
            "resources": _resources(plan, resources),
            "envs": env,
        }
        if pod.shm_bytes:
            out["sharedMemory"] = {"size": f"{math.ceil(pod.shm_bytes / MIB)}Mi"}
        for probe in ("livenessProbe", "readinessProbe"):
            if probe in main:
                out[probe] = main.pop(probe)
        out["extraPodMetadata"] = {"labels": pod.labels, "annotations": pod.annotations}
        out["extraPodSpec"] = {**rest, "mainContainer": main}
        return out


def _resources(plan: Plan, resources: Manifest) -> Manifest:
    """GPUs have a key of their own here; what is neither CPU, memory nor GPU is `custom`."""
    assert plan.cluster is not None
    out: Manifest = {}
    for kind, values in resources.items():
        own: Manifest = {k: v for k, v in values.items() if k in ("cpu", "memory")}
        gpu = values.get(plan.cluster["gpu_resource"])
        if gpu:
            own["gpu"] = gpu
        custom = {k: v for k, v in values.items() if k not in ("cpu", "memory", plan.cluster["gpu_resource"])}
        out[kind] = {**own, **({"custom": custom} if custom else {})}
    return out
