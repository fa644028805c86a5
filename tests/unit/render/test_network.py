"""Who may talk to whom: the plan's own connections, and nobody else."""

from __future__ import annotations

import re
from typing import Any

import pytest

from components.common.errors import DynamoBlobError
from graphs.render.core import pod_monitor
from graphs.render.network import edges, policies
from graphs.render.pods import pods
from tests.golden import rendering

GRAPH = rendering.ROOT / "graphs/disagg.yaml"


def rendered(*sets: str) -> dict[str, dict[str, Any]]:
    plan = rendering.plan_of(GRAPH, *sets)
    return {p["metadata"]["name"].removeprefix("disagg-"): p["spec"] for p in policies(plan, pods(plan))}


def peers(spec: dict[str, Any], way: str) -> set[tuple[str, int | None]]:
    key = "from" if way == "ingress" else "to"
    return {
        (peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"], rule["ports"][0].get("port"))
        for rule in spec[way] for peer in rule[key] if "namespaceSelector" not in peer and "podSelector" in peer
    }  # fmt: skip


def blocks(spec: dict[str, Any]) -> set[str]:
    return {peer["ipBlock"]["cidr"] for rule in spec["egress"] for peer in rule["to"] if "ipBlock" in peer}


def test_everything_is_refused_first() -> None:
    spec = rendered()["refuse-all"]
    assert spec["podSelector"] == {"matchLabels": {"app.kubernetes.io/part-of": "disagg"}}
    assert (spec["ingress"], spec["egress"], spec["policyTypes"]) == ([], [], ["Ingress", "Egress"])


def test_connections_within_the_graph() -> None:
    plan = rendering.plan_of(GRAPH)
    assert edges(plan, pods(plan)) == [
        ("decode", "frontend", 0), ("decode", "prefill", 0), ("decode", "router", 0), ("frontend", "decode", 0),
        ("frontend", "prefill", 0), ("frontend", "router", 8200), ("prefill", "decode", 0), ("prefill", "frontend", 0),
        ("prefill", "router", 0), ("router", "decode", 0), ("router", "prefill", 0),
    ]  # fmt: skip
    found = rendered()
    assert peers(found["router"], "ingress") == {("frontend", 8200), ("prefill", None), ("decode", None)}
    assert peers(found["weights"], "ingress") == set() == peers(found["weights"], "egress")  # a socket of the node
    for a in found:
        for b in found:
            if {a, b} & {"refuse-all"}:
                continue
            leaves = {p for p, _ in peers(found[a], "egress")}
            enters = {p for p, _ in peers(found[b], "ingress")}
            assert (b in leaves) == (a in enters), (a, b)  # an egress without its ingress would not work


def test_storage_is_reached_by_private_endpoint_and_only_by_those_with_an_identity() -> None:
    found = rendered()
    for name in ("frontend", "prefill", "decode", "weights"):
        assert "10.20.1.0/28" in blocks(found[name])
        assert not any(c.startswith("0.0.0.0") for c in blocks(found[name]))
    assert blocks(found["router"]) == {"10.20.0.0/28"}  # the API server: discovery
    assert "10.20.0.0/28" not in blocks(found["weights"])


@pytest.mark.parametrize("graph", ["disagg", "aks/gpt-oss-120b-h200", "disagg-cluster"])
def test_prometheus_scrapes_what_it_may_reach_and_nothing_else(graph: str) -> None:
    """A PodMonitor takes ports by name: the gateway's `http` is the API, the router's `http` has the metrics."""
    plan = rendering.plan_of(rendering.ROOT / f"graphs/{graph}.yaml")
    found = pods(plan)
    may = {
        (pod.name, rule["ports"][0]["port"])
        for pod, spec in ((p, s) for p in found for s in policies(plan, found) if s["metadata"]["name"] == f"{plan.graph}-{p.name}")
        for rule in spec["spec"]["ingress"]
        if any("monitoring" in str(peer.get("namespaceSelector")) for peer in rule["from"])
    }  # fmt: skip
    scraped = set()
    for endpoint in pod_monitor(plan, found)["spec"]["podMetricsEndpoints"]:
        kept = [re.compile(r["regex"]) for r in endpoint.get("relabelings", []) if r["action"] == "keep"]
        for pod in found:
            numbers = [p.number for p in pod.main.ports if p.name == endpoint["port"]]
            scraped |= {(pod.name, n) for n in numbers if all(k.fullmatch(pod.name) for k in kept)}
    assert scraped == may and ("router", 9091) in may and ("frontend", 9090) in may


def test_the_api_is_for_named_namespaces() -> None:
    ingress = rendered()["frontend"]["ingress"]
    outside = [
        (peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"], [p["port"] for p in rule["ports"]])
        for rule in ingress for peer in rule["from"] if "namespaceSelector" in peer
    ]  # fmt: skip
    assert outside == [("ingress", [8000]), ("monitoring", [9090])]


def test_a_cluster_without_its_addresses_is_refused(tmp_path: Any) -> None:
    for key in ("private_endpoint_cidr", "api_server_cidr"):
        cluster = tmp_path / f"{key}.yaml"
        cluster.write_text("".join(x for x in rendering.CLUSTER.read_text().splitlines(True) if not x.startswith(key)))
        plan = rendering.plan_of(GRAPH, cluster=cluster)
        with pytest.raises(DynamoBlobError, match="RENDER-NO-CIDR") as e:
            policies(plan, pods(plan))
        assert e.value.where == f"cluster.{key}"
