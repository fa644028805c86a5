"""What a serving namespace refuses, whoever applies it: ValidatingAdmissionPolicies, in CEL.

They bind to namespaces labelled ``dynamo-blob.io/serving=true``. Rules read what will run (images of pods, the
plan files themselves), not what annotations claim. The publishing identities come from ConfigMaps labelled
``dynamo-blob.io/admission=true``; with several of them, each must agree.
"""

from __future__ import annotations

from typing import Any

from graphs.plan import Plan
from graphs.render import base
from graphs.render.base import Manifest, metadata

DIGEST = "@sha256:[0-9a-f]{64}$"
CLIENT_ID = "azure.workload.identity/client-id"
PLAN_LABEL, SERVING_LABEL, ADMISSION_LABEL = f"{base.PREFIX}/plan", f"{base.PREFIX}/serving", f"{base.PREFIX}/admission"

PODS: list[Manifest] = [
    {
        "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"],
        "resources": ["pods", "pods/ephemeralcontainers"],
    }
]  # fmt: skip
"""Debug containers come through a subresource of their own, which `pods` does not cover."""
GRAPHS: list[Manifest] = [
    {
        "apiGroups": ["nvidia.com"], "apiVersions": ["v1beta1", "v1alpha1"], "operations": ["CREATE", "UPDATE"],
        "resources": ["dynamographdeployments"],
    }
]  # fmt: skip
CONFIGS: list[Manifest] = [
    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["configmaps"]},
]
ACCOUNTS: list[Manifest] = [
    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["serviceaccounts"]},
]


def _all(path: str, inner: str) -> str:
    """CEL: every element of `path` (which may be absent) satisfies `inner` of `c`."""
    return f"!has({path}) || {path}.all(c, {inner})"


_PINNED = f"c.image.matches('{DIGEST}')"
_IS = r"[ \n\r\t]*:[ \n\r\t]*"
"""Between a JSON key and its value, however it was written."""
_PLANS = f"!has(object.metadata.labels) || !('{PLAN_LABEL}' in object.metadata.labels) || !has(object.data)"


def _plan_rule(test: str) -> str:
    """CEL over every file of a plan ConfigMap; `test` speaks of the text `t`."""
    return f"{_PLANS} || object.data.all(k, {test.replace('$t', 'object.data[k]')})"


RULES: dict[str, tuple[list[Manifest], list[tuple[str, str]]]] = {
    "images": (
        PODS,
        [
            (
                _all("object.spec.containers", _PINNED),
                "IMAGE-UNPINNED: every image is pinned by digest (name@sha256:...)",
            ),
            (_all("object.spec.initContainers", _PINNED), "IMAGE-UNPINNED: every init image is pinned by digest"),
            (_all("object.spec.ephemeralContainers", _PINNED), "IMAGE-UNPINNED: every debug image is pinned by digest"),
        ],
    ),
    "graphs": (
        GRAPHS,
        [
            (
                "!has(object.spec.components) || object.spec.components.all(x, has(x.podTemplate) && has(x.podTemplate.spec)"
                f" && x.podTemplate.spec.containers.all(c, {_PINNED}))",
                "IMAGE-UNPINNED: every image of a graph is pinned by digest",
            ),
            (
                "!has(object.spec.services) || object.spec.services.all(k, has(object.spec.services[k].extraPodSpec)"
                " && has(object.spec.services[k].extraPodSpec.mainContainer)"
                f" && object.spec.services[k].extraPodSpec.mainContainer.image.matches('{DIGEST}'))",
                "IMAGE-UNPINNED: every image of a graph is pinned by digest",
            ),
            (
                f"has(object.metadata.annotations) && '{base.PREFIX}/manifest-digest' in object.metadata.annotations"
                f" && object.metadata.annotations['{base.PREFIX}/manifest-digest'].matches('^[0-9a-f]{{64}}$')",
                "RELEASE-UNPINNED: a graph names the digest of its release's manifest",
            ),
        ],
    ),
    "plans": (
        CONFIGS,
        [
            (
                _plan_rule(
                    f"""!$t.contains('"manifest_digest"') || $t.matches('"manifest_digest"{_IS}"[0-9a-f]{{64}}"')"""
                ),
                "RELEASE-UNPINNED: a plan names the digest of its release's manifest",
            ),
            (
                _plan_rule(f"""!$t.contains('"trust"') || $t.matches('"require"{_IS}"approval"')"""),
                "RELEASE-UNAPPROVED: a plan accepts approved releases only",
            ),
            (
                _plan_rule(f"""!$t.matches('"approver_keys"{_IS}[[][^"]*[]]')"""),
                "RELEASE-UNAPPROVED: a plan names the keys whose approvals count",
            ),
            (
                _plan_rule(f"""!$t.matches('"allow_unverified"{_IS}true')"""),
                "LOADER-UNVERIFIED: weights are loaded by a loader that verifies them",
            ),
            (
                _plan_rule(f"""!$t.matches('"loader"{_IS}"(auto|runai_streamer|modelexpress)"')"""),
                "LOADER-UNVERIFIED: weights are loaded by a loader that verifies them",
            ),
            (
                _plan_rule(f"""!$t.matches('"unsafe_skip_proof"{_IS}true')"""),
                "KV-UNPROVEN: KV rows are proven before they are used",
            ),
        ],
    ),
    "identities": (
        ACCOUNTS,
        [
            (
                f"!has(object.metadata.annotations) || !('{CLIENT_ID}' in object.metadata.annotations)"
                f" || !has(params.data) || !params.data.exists(k, params.data[k] == object.metadata.annotations['{CLIENT_ID}'])",
                "IDENTITY-PUBLISHES: an identity that publishes or approves does not serve",
            ),
        ],
    ),
}
"""Policy -> (what it looks at, [(CEL that must hold, message)])."""


def policies() -> list[Manifest]:
    """The same for every graph: applying them twice changes nothing."""
    out: list[Manifest] = []
    for name, (resources, rules) in RULES.items():
        needs_params = any("params" in expression for expression, _ in rules)
        spec: Manifest = {
            "failurePolicy": "Fail",
            **({"paramKind": {"apiVersion": "v1", "kind": "ConfigMap"}} if needs_params else {}),
            "matchConstraints": {"resourceRules": resources},
            "validations": [
                {"expression": e, "message": m, "reason": "Forbidden"} for e, m in rules
            ],
        }  # fmt: skip
        binding: Manifest = {
            "policyName": f"dynamo-blob-{name}",
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchLabels": {SERVING_LABEL: "true"}}},
        }
        if needs_params:
            chosen: dict[str, Any] = {"matchLabels": {ADMISSION_LABEL: "true"}}
            binding["paramRef"] = {"selector": chosen, "parameterNotFoundAction": "Deny"}
        out.append(_object("ValidatingAdmissionPolicy", name, spec))
        out.append(_object("ValidatingAdmissionPolicyBinding", name, binding))
    return out


def parameters(plan: Plan) -> Manifest:
    """Client ids that may publish or approve, and therefore may not serve."""
    assert plan.cluster is not None
    identities = plan.cluster["identities"]
    refused = {
        k: identities[k]["client_id"] for k in ("publisher", "approver") if identities.get(k, {}).get("client_id")
    }
    own = metadata(plan, f"{plan.graph}-admission")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**own, "labels": {**own["labels"], ADMISSION_LABEL: "true"}},
        "data": refused,
    }


def _object(kind: str, name: str, spec: Manifest) -> Manifest:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": f"dynamo-blob-{name}", "labels": {base.MANAGED_LABEL[0]: base.MANAGED_LABEL[1]}},
        "spec": spec,
    }
