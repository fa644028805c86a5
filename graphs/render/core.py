"""Objects of core Kubernetes around the operator's: accounts, plans, the weight service of each node, budgets, metrics."""

from __future__ import annotations

import re

from components.common.errors import DynamoBlobError
from graphs.plan import Plan
from graphs.render import base
from graphs.render.base import Manifest, Pod, metadata
from graphs.render.pods import SERVICE_ACCOUNT, config_files, config_map_name, plan_digest, service_account
from graphs.render.site import ROUTER_PORT


def service_accounts(plan: Plan, pods: list[Pod]) -> list[Manifest]:
    """One a class of identity. Serving ones carry a client id; the router's needs none."""
    assert plan.cluster is not None
    used = {p.service_account for p in pods}
    out = []
    for identity, short in SERVICE_ACCOUNT.items():
        name = service_account(plan, identity)
        if name not in used:
            continue
        more: Manifest = {}
        if short != "runtime":
            client_id = plan.cluster["identities"].get(short, {}).get("client_id", "")
            if not client_id:
                raise DynamoBlobError(
                    "RENDER-NO-IDENTITY", f"the {short} identity has no client id", where=f"cluster.identities.{short}.client_id",
                    why="its pods could not read storage", do="name the client id of the user-assigned identity",
                )  # fmt: skip
            more = {"annotations": {"azure.workload.identity/client-id": client_id}}
        out.append({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(plan, name, **more)})
    return out


def discovery_binding(plan: Plan, pods: list[Pod]) -> Manifest:
    """The operator binds its discovery role to its own account only; ours need it too (ai-dynamo/dynamo issue 10590)."""
    assert plan.cluster is not None
    accounts = sorted({p.service_account for p in pods if p.kind != "node"})
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(plan, f"{plan.graph}-discovery"),
        "subjects": [{"kind": "ServiceAccount", "name": a, "namespace": plan.cluster["namespace"]} for a in accounts],
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": f"{plan.graph}-k8s-service-discovery-role",
        },
    }


def plans(plan: Plan) -> Manifest:
    """Every configuration file; immutable, because its name is its content."""
    release = plan.release
    annotations = {
        f"{base.PREFIX}/plan-digest": plan_digest(plan),
        f"{base.PREFIX}/release": f"{release['model']}/{release['version'] or release['channel']}",
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            **metadata(plan, config_map_name(plan), annotations=annotations),
            "labels": {**base.labels(plan), f"{base.PREFIX}/plan": "true"},
        },
        "immutable": True,
        "data": config_files(plan),
    }


def daemon_set(plan: Plan, pod: Pod) -> Manifest:
    """The weight service of every node: reads Blob, writes the node's tmpfs, answers on a socket of the node."""
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata(plan, f"{plan.graph}-{pod.name}", pod.name),
        "spec": {
            "selector": {"matchLabels": selector(plan, pod.name)},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
            "template": {"metadata": {"labels": pod.labels, "annotations": pod.annotations}, "spec": pod.spec},
        },
    }


def router_service(plan: Plan) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan, f"{plan.graph}-router-decide", "router"),
        "spec": {
            "selector": selector(plan, "router"),
            "ports": [{"name": "decide", "port": ROUTER_PORT, "targetPort": ROUTER_PORT, "protocol": "TCP"}],
        },
    }


def api_service(plan: Plan) -> Manifest:
    """The OpenAI API inside the cluster; an ingress of your own goes in front of it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan, f"{plan.graph}-api", "frontend"),
        "spec": {
            "selector": selector(plan, "frontend"),
            "ports": [{"name": "http", "port": 80, "targetPort": 8000, "protocol": "TCP"}],
        },
    }


def disruption_budgets(plan: Plan, pods: list[Pod]) -> list[Manifest]:
    """One replica at a time may leave of its own accord. A single replica has no budget: it would block every drain."""
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(plan, f"{plan.graph}-{pod.name}", pod.name),
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(plan, pod.name)}},
        }
        for pod in pods
        if pod.replicas > 1
    ]


def pod_monitor(plan: Plan, pods: list[Pod]) -> Manifest:
    """Prometheus scrapes every port that serves /metrics, and no other of the same name (`http` of the gateway is the API)."""
    ports = sorted({name for pod in pods for name in metric_ports(pod)})
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(plan, plan.graph),
        "spec": {
            "selector": {"matchLabels": {base.GRAPH_LABEL: plan.graph}},
            "podTargetLabels": [base.GRAPH_LABEL, base.COMPONENT_LABEL],
            "podMetricsEndpoints": [
                {"port": name, "path": "/metrics", "interval": "15s", **_of_some(name, pods)} for name in ports
            ],
        },
    }


def _of_some(port: str, pods: list[Pod]) -> Manifest:
    """The components whose `port` has metrics, where other components have a port of that name too."""
    having = {pod.name for pod in pods if any(p.name == port for p in pod.main.ports)}
    wanted = {pod.name for pod in pods if port in metric_ports(pod)}
    if having == wanted:
        return {}
    label = "__meta_kubernetes_pod_label_" + re.sub(r"[^A-Za-z0-9_]", "_", base.COMPONENT_LABEL)
    return {"relabelings": [{"sourceLabels": [label], "regex": "|".join(sorted(wanted)), "action": "keep"}]}


def metric_ports(pod: Pod) -> dict[str, int]:
    """Names and numbers of a pod's ports with metrics: the system port of workers, ops of the gateway, http of the router."""
    own = {p.name: p.number for p in pod.main.ports}
    wanted = {"frontend": ("ops",), "router": ("http",)}.get(pod.name, ("system",))
    return {name: own[name] for name in wanted if name in own}


def selector(plan: Plan, component: str) -> dict[str, str]:
    return {base.GRAPH_LABEL: plan.graph, base.COMPONENT_LABEL: component}
