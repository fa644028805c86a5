"""Who may talk to whom. Everything is refused first; then the plan's `talks_to`, and the few ways back that Dynamo needs.

Ports that the operating system gives out (Dynamo's request and event planes, UCX) cannot be named: between
two components that share such a plane every TCP port is open, to everyone else none.
"""

from __future__ import annotations

from typing import Any

from components.common.errors import DynamoBlobError
from graphs.plan import Plan
from graphs.render import base
from graphs.render.base import Manifest, Pod, metadata
from graphs.render.core import metric_ports, selector
from graphs.render.site import GATEWAY_PORT, ROUTER_PORT

Edge = tuple[str, str, int]
"""(from pod, to pod, TCP port; 0 = any)."""


def policies(plan: Plan, pods: list[Pod]) -> list[Manifest]:
    """One that refuses all, one a component. Raises RENDER-NO-CIDR."""
    out = [_policy(plan, "refuse-all", {base.GRAPH_LABEL: plan.graph}, [], [])]
    allowed = edges(plan, pods)
    for pod in pods:
        ingress = [
            {"from": [{"podSelector": {"matchLabels": selector(plan, source)}}], **_ports(port)}
            for source, target, port in allowed
            if target == pod.name
        ]
        egress = [
            {"to": [{"podSelector": {"matchLabels": selector(plan, target)}}], **_ports(port)}
            for source, target, port in allowed
            if source == pod.name
        ]
        ingress += _from_outside(plan, pod)
        egress += _to_outside(plan, pod)
        out.append(_policy(plan, pod.name, selector(plan, pod.name), ingress, egress))
    return out


def edges(plan: Plan, pods: list[Pod]) -> list[Edge]:
    """Every connection between pods of the graph, from the plan's `talks_to`."""
    home: dict[str, str] = {p.component: pod.name for pod in pods for p in (pod.main, *pod.sidecars)}
    workers = [pod.name for pod in pods if pod.main.component in base.WORKERS]
    found: set[Edge] = set()
    for pod in pods:
        for process in (pod.main, *pod.sidecars):
            for target in process.talks_to:
                to = home.get(target)
                if to is None or to == pod.name or target == "weights":  # weights: a socket of the node, no network
                    continue
                found.add((pod.name, to, ROUTER_PORT if target == "router" else 0))
    if "frontend" in home.values():
        found |= {(w, "frontend", 0) for w in workers}  # workers connect back to stream their answers
    if "router" in home.values():
        found |= {(w, "router", 0) for w in workers}
    if {"prefill", "decode"} <= set(workers):
        found |= {("prefill", "decode", 0), ("decode", "prefill", 0)}  # UCX connects both ways
    return sorted(found)


def _ports(port: int) -> Manifest:
    return {"ports": [{"protocol": "TCP", "port": port}]} if port else {"ports": [{"protocol": "TCP"}]}


def _from_outside(plan: Plan, pod: Pod) -> list[Manifest]:
    assert plan.cluster is not None
    out: list[Manifest] = []
    if pod.kind == "frontend" and plan.cluster["gateway_from"]:
        out.append({"from": [_namespace(n) for n in plan.cluster["gateway_from"]], **_ports(GATEWAY_PORT)})
    watching = plan.cluster["monitoring_namespace"]
    ports = metric_ports(pod)
    if watching and ports:
        out.append({
            "from": [_namespace(watching)],
            "ports": [{"protocol": "TCP", "port": n} for n in ports.values()],
        })  # fmt: skip
    return out


def _to_outside(plan: Plan, pod: Pod) -> list[Manifest]:
    assert plan.cluster is not None
    cluster = plan.cluster
    dns = {
        "to": [{**_namespace("kube-system"), "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
        "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
    }
    out: list[Manifest] = [dns]
    if any(p.identity != "none" for p in (pod.main, *pod.sidecars)):
        storage = _cidr(cluster, "private_endpoint_cidr", "storage is reached by private endpoint only")
        out.append({"to": [_block(storage)], **_ports(443)})
        out.append({"to": [_block(c) for c in cluster["identity_cidrs"]], **_ports(443)})
    if plan.discovery == "kubernetes" and pod.kind != "node":
        server = _cidr(cluster, "api_server_cidr", "discovery asks the API server")
        out.append({"to": [_block(server)], **_ports(443)})
    return out + _planes(plan, pod)


def _planes(plan: Plan, pod: Pod) -> list[Manifest]:
    """etcd and NATS, where the plan's own environment and files name them."""
    everyone = (pod.main, *pod.sidecars)
    env = next((p.env for p in everyone if "DYN_DISCOVERY_BACKEND" in p.env), {})
    urls = [env[k] for k in ("ETCD_ENDPOINTS", "NATS_SERVER") if k in env]
    urls += [url for p in everyone if (url := (p.config or {}).get("announce"))]
    ports = sorted({int(url.rsplit(":", 1)[1]) for url in urls})
    anywhere: list[Any] = [{"namespaceSelector": {}}]
    return [{"to": anywhere, "ports": [{"protocol": "TCP", "port": p} for p in ports]}] if ports else []


def _cidr(cluster: Manifest, key: str, why: str) -> str:
    if not cluster[key]:
        raise DynamoBlobError(
            "RENDER-NO-CIDR",
            f"cluster.{key} is not given",
            where=f"cluster.{key}",
            why=why,
            do="write it as 10.1.2.0/28",
        )
    return str(cluster[key])


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _block(cidr: str) -> Manifest:
    return {"ipBlock": {"cidr": cidr}}


def _policy(plan: Plan, name: str, pods: Manifest, ingress: list[Manifest], egress: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(plan, f"{plan.graph}-{name}"),
        "spec": {"podSelector": {"matchLabels": pods}, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress},
    }  # fmt: skip
