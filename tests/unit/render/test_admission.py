"""The policies' CEL, run on good and bad objects. Good ones are what we render ourselves."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import celpy
import pytest
from celpy.adapter import json_to_cel

from graphs.render.admission import parameters, policies
from graphs.render.output import manifests
from tests.golden import rendering, schemas

DISAGG = rendering.ROOT / "graphs/disagg.yaml"
KINDS = {"pods": "images", "dynamographdeployments": "graphs", "configmaps": "plans", "serviceaccounts": "identities"}


@cache
def programs(name: str) -> list[tuple[Any, str]]:
    policy = next(
        p
        for p in policies()
        if p["kind"] == "ValidatingAdmissionPolicy" and p["metadata"]["name"] == f"dynamo-blob-{name}"
    )
    env = celpy.Environment()
    return [(env.program(env.compile(v["expression"])), v["message"]) for v in policy["spec"]["validations"]]


def refusals(name: str, item: dict[str, Any], params: dict[str, Any] | None = None) -> list[str]:
    values = {"object": json_to_cel(item), "params": json_to_cel(params or {})}
    out = []
    for program, message in programs(name):
        verdict = program.evaluate(values)
        if isinstance(verdict, Exception) or not verdict:
            out.append(message.partition(":")[0])
    return out


@cache
def objects(api: str = "v1beta1", graph: Any = DISAGG) -> str:
    return json.dumps(manifests(rendering.plan_of(graph), api))


def one(kind: str, api: str = "v1beta1", name: str = "") -> dict[str, Any]:
    return next(i for i in json.loads(objects(api)) if i["kind"] == kind and name in i["metadata"]["name"])


def test_what_we_render_is_admitted() -> None:
    for api in ("v1beta1", "v1alpha1"):
        graph = one("DynamoGraphDeployment", api)
        assert refusals("graphs", graph) == []
        for pod in schemas.templates(graph):
            assert refusals("images", pod) == []
    assert refusals("plans", one("ConfigMap", name="plans")) == []
    params = one("ConfigMap", name="admission")
    for item in json.loads(objects()):
        if item["kind"] == "ServiceAccount":
            assert refusals("identities", item, params) == []


@pytest.mark.parametrize("where", ["containers", "initContainers", "ephemeralContainers"])
@pytest.mark.parametrize(
    "image",
    ["nginx", "nginx:1.27", "nginx@sha256:abc", "nginx:latest@sha256:" + "G" * 64, "x@sha256:" + "a" * 64 + "b"],
)
def test_an_image_that_is_not_pinned_is_refused(where: str, image: str) -> None:
    pod = schemas.templates(one("DynamoGraphDeployment"))[0]
    pod["spec"][where] = [*pod["spec"].get(where, []), {"name": "x", "image": image}]
    assert refusals("images", pod) == ["IMAGE-UNPINNED"]


def test_debug_containers_are_asked_about() -> None:
    """`kubectl debug` writes them through a subresource of its own: a rule for pods alone never sees them."""
    policy = next(p for p in policies() if p["metadata"]["name"].endswith("-images") and "Binding" not in p["kind"])
    rules = policy["spec"]["matchConstraints"]["resourceRules"]
    assert {r for rule in rules for r in rule["resources"]} == {"pods", "pods/ephemeralcontainers"}


def test_a_graph_with_an_unpinned_image_or_release_is_refused() -> None:
    graph = one("DynamoGraphDeployment")
    graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]["image"] = "registry.example.com/worker:v1"
    assert refusals("graphs", graph) == ["IMAGE-UNPINNED"]
    old = one("DynamoGraphDeployment", "v1alpha1")
    old["spec"]["services"]["decode"]["extraPodSpec"]["mainContainer"]["image"] = "worker"
    assert refusals("graphs", old) == ["IMAGE-UNPINNED"]
    graph = one("DynamoGraphDeployment")
    graph["metadata"]["annotations"]["dynamo-blob.io/manifest-digest"] = "latest"
    assert refusals("graphs", graph) == ["RELEASE-UNPINNED"]
    del graph["metadata"]["annotations"]
    assert refusals("graphs", graph) == ["RELEASE-UNPINNED"]


def changed(file: str, **weights: Any) -> dict[str, Any]:
    """The plans with one file's `weights` changed, written in another style of JSON than ours."""
    item = copy.deepcopy(one("ConfigMap", name="plans"))
    config = json.loads(item["data"][file])
    for key, value in weights.items():
        *path, last = key.split("__")
        target = config["weights"]
        for part in path:
            target = target[part]
        target[last] = value
    item["data"][file] = json.dumps(config, separators=(",", ":"))
    return item


@pytest.mark.parametrize(
    ("weights", "code"),
    [
        ({"release__manifest_digest": ""}, "RELEASE-UNPINNED"),
        ({"release__manifest_digest": "latest"}, "RELEASE-UNPINNED"),
        ({"trust__require": "none"}, "RELEASE-UNAPPROVED"),
        ({"trust__require": "signature"}, "RELEASE-UNAPPROVED"),
        ({"trust__approver_keys": []}, "RELEASE-UNAPPROVED"),
        ({"allow_unverified": True}, "LOADER-UNVERIFIED"),
        ({"loader": "runai_streamer"}, "LOADER-UNVERIFIED"),
        ({"loader": "modelexpress"}, "LOADER-UNVERIFIED"),
    ],
)
def test_a_plan_that_would_serve_unproven_weights_is_refused(weights: dict[str, Any], code: str) -> None:
    assert refusals("plans", changed("prefill.json")) == []  # the other style alone changes nothing
    assert refusals("plans", changed("prefill.json", **weights)) == [code]


def test_configmaps_that_are_no_plans_are_left_alone() -> None:
    other = changed("prefill.json", allow_unverified=True)
    del other["metadata"]["labels"]["dynamo-blob.io/plan"]
    assert refusals("plans", other) == []
    assert refusals("plans", {"metadata": {"name": "x"}, "data": {"a": '"allow_unverified": true'}}) == []


@pytest.mark.parametrize("graph", ["baseline-modelexpress", "baseline-lmcache"])
def test_the_baselines_are_refused_in_serving_namespaces(graph: str) -> None:
    items = json.loads(objects(graph=rendering.ROOT / f"graphs/aks/{graph}.yaml"))
    plans = next(i for i in items if i["kind"] == "ConfigMap" and "plans" in i["metadata"]["name"])
    assert set(refusals("plans", plans)) == {"LOADER-UNVERIFIED"}


def test_an_identity_that_publishes_does_not_serve() -> None:
    params = one("ConfigMap", name="admission")
    assert params == parameters(rendering.plan_of(DISAGG))
    account = one("ServiceAccount", name="weights")
    for role in ("publisher", "approver"):
        account["metadata"]["annotations"]["azure.workload.identity/client-id"] = params["data"][role]
        assert refusals("identities", account, params) == ["IDENTITY-PUBLISHES"]
    assert refusals("identities", {"metadata": {"name": "default"}}, params) == []


def test_policies_deny_and_fail_closed() -> None:
    found = policies()
    for item in found:
        assert schemas.faults(item) == []
        if item["kind"] == "ValidatingAdmissionPolicy":
            assert item["spec"]["failurePolicy"] == "Fail"
        else:
            assert item["spec"]["validationActions"] == ["Deny"]
            assert item["spec"]["matchResources"]["namespaceSelector"]["matchLabels"] == {
                "dynamo-blob.io/serving": "true"
            }
    bound = {i["spec"]["policyName"] for i in found if i["kind"].endswith("Binding")}
    assert bound == {f"dynamo-blob-{n}" for n in KINDS.values()}
