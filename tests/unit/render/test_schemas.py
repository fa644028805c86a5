"""Everything rendered is accepted by the schemas of the core API, of both versions of the operator's, and of the PodMonitor."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden import rendering, schemas

FILES = sorted((rendering.HERE / "rendered").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_golden_is_valid(path: Any) -> None:
    items = rendering.documents(path.read_text())
    assert items
    assert [f for item in items for f in schemas.faults(item)] == []


def graph() -> dict[str, Any]:
    items = rendering.documents((rendering.HERE / "rendered/disagg.yaml").read_text())
    return next(i for i in items if i["kind"] == "DynamoGraphDeployment")


def component(item: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in item["spec"]["components"] if c["name"] == name)


def test_the_schemas_refuse_what_the_operator_refuses() -> None:
    """Negative controls: each fault alone is found."""
    item = graph()
    component(item, "prefill")["subComponentType"] = "prefill"  # a key of v1alpha1
    assert "subComponentType" in str(schemas.faults(item))
    item = graph()
    component(item, "router")["type"] = "router"  # no such type
    assert "'router'" in str(schemas.faults(item))
    item = graph()
    component(item, "decode")["podTemplate"]["spec"]["containers"][0]["name"] = "worker"  # must be `main`
    assert schemas.faults(item)
    item = graph()
    component(item, "decode")["podTemplate"]["spec"]["containers"][0]["env"].append({"name": "X", "value": 1})
    assert "value" in str(schemas.faults(item))
    item = graph()
    component(item, "decode")["podTemplate"]["spec"]["serviceAcount"] = "x"  # inside the pod: the core schema sees it
    assert "serviceAcount" in str(schemas.faults(item))
    item = graph()
    component(item, "decode")["runtimeVersionOverride"] = "v1.6"
    assert schemas.faults(item)
