"""How the goldens are rendered: every shipped graph, for the example cluster, with placeholders where a graph is local."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from graphs.cli.render import cluster_plan
from graphs.plan import Plan
from graphs.render.output import manifests, to_yaml

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CLUSTER = ROOT / "deploy/cluster.example.yaml"
LOCAL = (
    "components.frontend.auth=keys", "components.frontend.tenants_file=../configs/tenants/example.yaml",
    f'model.manifest_digest="{"a" * 64}"', f'model.weights_digest="{"b" * 64}"',
)  # fmt: skip
"""What a graph for one machine leaves open: keys instead of an open gateway, and the release by digest."""


_CLUSTER = ("runtime.etcd_url=http://etcd.dynamo-system:2379", "runtime.nats_url=nats://nats.dynamo-system:4222")
PLANES = {"mock-cluster": _CLUSTER, "disagg-cluster": _CLUSTER}


def graph_files() -> list[Path]:
    """Every shipped graph that is not one of somebody's in the making."""
    return sorted(p for d in ("graphs", "graphs/aks") for p in (ROOT / d).glob("*.yaml"))


def is_local(graph: Path) -> bool:
    return graph.parent.name != "aks"


def plan_of(graph: Path, *sets: str, cluster: Path = CLUSTER) -> Plan:
    import os

    here = os.getcwd()
    os.chdir(ROOT)  # a plan names its graph as the user did: relative
    try:
        return cluster_plan(
            str(graph.relative_to(ROOT)),
            [*(LOCAL if is_local(graph) else ()), *PLANES.get(graph.stem, ()), *sets],
            cluster,
        )
    finally:
        os.chdir(here)


def text_of(graph: Path, api: str = "v1beta1", *sets: str) -> str:
    return to_yaml(manifests(plan_of(graph, *sets), api, admit=False))


def documents(text: str) -> list[dict[str, Any]]:
    """As another parser than ours reads it: YAML 1.1, like the one kubectl uses."""
    return list(yaml.safe_load_all(text))


def goldens() -> dict[str, str]:
    """File name -> what it must hold."""
    out = {f"{g.stem}.yaml": text_of(g) for g in graph_files()}
    out["disagg.v1alpha1.yaml"] = text_of(ROOT / "graphs/disagg.yaml", "v1alpha1")
    from graphs.render.admission import policies

    out["admission.yaml"] = to_yaml(policies())
    return out


if __name__ == "__main__":  # python -m tests.golden.rendering: write them anew, then read the diff
    for name, text in goldens().items():
        (HERE / "rendered" / name).write_text(text)
