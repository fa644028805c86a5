"""Rendered objects against the schemas that a cluster would hold them to."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

CRD = Path(__file__).parent / "crd"
KUBERNETES = "1.32"


@cache
def validator(name: str) -> Any:
    return jsonschema.Draft202012Validator(yaml.safe_load((CRD / f"{name}.schema.yaml").read_text()))


def faults(item: dict[str, Any]) -> list[str]:
    """What the API server would refuse `item` for: its schema, and for graphs the pod templates inside."""
    name = f"{item['kind']}/{item['metadata']['name']}"
    if item["kind"] == "DynamoGraphDeployment":
        version = item["apiVersion"].rpartition("/")[2]
        errors = validator(f"dgd-{version}-derived").iter_errors(item)
        out = [f"{name}: {e.json_path}: {e.message}" for e in errors]
        return out + [f for pod in templates(item) for f in core_faults(pod, f"{name}: ")]
    if item["kind"] == "PodMonitor":
        return [f"{name}: {e.json_path}: {e.message}" for e in validator("podmonitor").iter_errors(item)]
    return core_faults(item, "")


def core_faults(item: dict[str, Any], prefix: str) -> list[str]:
    try:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as e:
        return [f"{prefix}{item['kind']}/{item['metadata']['name']}: {e}"]
    return []


def templates(graph: dict[str, Any]) -> list[dict[str, Any]]:
    """Every pod template of a DynamoGraphDeployment as a Pod."""
    spec, out = graph["spec"], []
    for component in spec.get("components", []):
        template = component["podTemplate"]
        out.append(pod(component["name"], template["metadata"], template["spec"]))
    for name, service in spec.get("services", {}).items():
        own = dict(service["extraPodSpec"])
        main = {"name": "main", **own.pop("mainContainer"), "env": service["envs"]}
        out.append(pod(name, service["extraPodMetadata"], {**own, "containers": [main]}))
    return out


def pod(name: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}
