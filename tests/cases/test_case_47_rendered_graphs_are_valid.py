"""Case 47 (dynamo#10419): the webhook rejected examples that were shipped.

Every shipped graph, rendered for every version of the operator's API that we claim, is held to that version's schema
and to the core schemas of what is inside. Which faults the schemas find is shown in tests/unit/render/test_schemas.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.common.errors import DynamoBlobError
from graphs.render.output import RENDERERS, manifests, to_yaml
from tests.golden import rendering, schemas


@pytest.mark.parametrize("api", sorted(RENDERERS))
@pytest.mark.parametrize("graph", rendering.graph_files(), ids=lambda g: g.stem)
def test_every_shipped_graph_is_valid_for_every_api(graph: Path, api: str) -> None:
    items = manifests(rendering.plan_of(graph), api, admit=False)  # the policies: test_admission
    deployments = [i for i in items if i["kind"] == "DynamoGraphDeployment"]
    assert [d["apiVersion"] for d in deployments] == [f"nvidia.com/{api}"]
    assert [f for i in items for f in schemas.faults(i)] == []


def test_both_versions_run_the_same() -> None:
    """A conversion that lost a setting would be a deployment that differs by the age of the operator."""
    plan = rendering.plan_of(rendering.ROOT / "graphs/aks/gpt-oss-120b-h200.yaml")
    new, old = (_pods(manifests(plan, api)) for api in ("v1beta1", "v1alpha1"))
    assert set(new) == set(old) == {"frontend", "prefill", "decode", "router", "sweeper"}
    for name in new:
        a, b = new[name], old[name]
        for key in ("livenessProbe", "readinessProbe", "resources"):  # fields of their own in v1alpha1
            a["spec"]["containers"][0].pop(key, None)
        assert a == b, name


def _pods(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    graph = next(i for i in items if i["kind"] == "DynamoGraphDeployment")
    return {p["metadata"].get("labels", {})["app.kubernetes.io/component"]: p for p in schemas.templates(graph)}


def test_strings_stay_strings_for_every_yaml_parser() -> None:
    """kubectl's parser speaks YAML 1.1: an unquoted `on`, `y` or `1_000` would not be the string that the plan holds."""
    words = [
        "on",
        "y",
        "N",
        "yes",
        "null",
        "~",
        "1",
        "0x1",
        "1_000",
        "1e3",
        "2026-11-29",
        "12:30",
        "",
        " x",
        "a: b",
        "#",
        "é",
        "-",
        "a\nb\n",
    ]
    text = to_yaml(
        [{"env": [{"name": f"X{i}", "value": w} for i, w in enumerate(words)], "keys": {w: 1 for w in words[:6]}}]
    )
    read = rendering.documents(text)[0]
    assert [e["value"] for e in read["env"]] == words
    assert list(read["keys"]) == words[:6]
    for word in words:
        if "\n" not in word:
            assert f'value: "{word}"' in text, "quoted, so that no parser decides"


def test_an_api_that_is_not_known_is_refused_with_the_names_that_are() -> None:
    with pytest.raises(DynamoBlobError, match="RENDER-API") as e:
        manifests(rendering.plan_of(rendering.ROOT / "graphs/disagg.yaml"), "v1beta2")
    assert "v1beta1" in e.value.why
