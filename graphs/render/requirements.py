"""What a plan must hold before it is rendered: what would deploy healthy and then serve the wrong thing, or not at all."""

from __future__ import annotations

import re

from graphs.load import Finding
from graphs.plan import Plan
from graphs.render import base

MOST_LABEL = 63
"""Characters of a label's value."""
_DIGEST = re.compile(r"^[0-9a-f]{64}$")


def demand(plan: Plan) -> None:
    """Raises the first finding; the others stand in its data."""
    found = findings(plan)
    if found:
        error = found[0].as_error()
        if len(found) > 1:
            error.data["findings"] = [f.as_json() for f in found]
            error.why = f"{error.why} ({len(found) - 1} more: {', '.join(sorted({f.code for f in found[1:]}))})".strip()
        raise error


def findings(plan: Plan) -> list[Finding]:
    if plan.cluster is None:
        return [
            Finding(
                "RENDER-NO-CLUSTER", "the graph says nothing of a cluster", plan.source, "",
                "add `cluster:` to the graph, or pass --cluster FILE (deploy/cluster.example.yaml)",
            )
        ]  # fmt: skip
    return _names(plan) + _release(plan) + _gateway(plan) + _times(plan) + _identities(plan) + _planes(plan)


def _names(plan: Plan) -> list[Finding]:
    if len(plan.namespace) <= MOST_LABEL:
        return []
    return [
        Finding(
            "RENDER-NAME-LENGTH", f"the Dynamo namespace '{plan.namespace}' is longer than {MOST_LABEL} characters", plan.source,
            "the operator makes it of the Kubernetes namespace and the graph's name, and labels every pod with it",
            "shorten cluster.namespace or the graph's name",
        )
    ]  # fmt: skip


def _release(plan: Plan) -> list[Finding]:
    out = []
    if not _DIGEST.match(plan.release["manifest_digest"]):
        out.append(
            Finding(
                "RENDER-RELEASE-UNPINNED",
                "the release is not pinned by digest",
                plan.source,
                "a channel or a version alone may be moved or republished between two pods of one graph",
                "give model.manifest_digest (and model.weights_digest) as `dynamo release show` prints them",
            )
        )
    for process in plan.processes:
        weights = (process.config or {}).get("weights") or {}
        if weights and weights["trust"]["require"] == "approval" and not weights["trust"]["approver_keys"]:
            out.append(
                Finding(
                    "RENDER-NO-KEYS",
                    "approval is demanded, but no approver key is named",
                    f"{plan.source}: {process.name}",
                    "nothing would ever be accepted",
                    "name trust.approver_keys, or cluster.trust",
                )
            )
            break
    return out


def _gateway(plan: Plan) -> list[Finding]:
    for process in plan.processes:
        if process.component == "frontend" and (process.config or {}).get("auth") != "keys":
            return [
                Finding(
                    "RENDER-OPEN-GATEWAY",
                    "the gateway asks nobody for a key",
                    f"{plan.source}: components.frontend.auth",
                    "`none` is for loopback; in a cluster it listens on the pod's address",
                    "set auth: keys and a tenants_file",
                )
            ]
    return []


def _times(plan: Plan) -> list[Finding]:
    return [
        Finding(
            "RENDER-GRACE", f"{p.name} is killed before it has drained", plan.source,
            f"drain {p.drain_s:g} s, grace {p.grace_s:g} s", "let grace_s exceed drain_s",
        )
        for p in plan.processes
        if p.grace_s <= p.drain_s
    ]  # fmt: skip


def _identities(plan: Plan) -> list[Finding]:
    assert plan.cluster is not None
    ids = {k: v.get("client_id", "") for k, v in plan.cluster["identities"].items()}
    out = []
    for publishing in ("publisher", "approver"):
        for serving in ("serving", "weights"):
            if ids.get(publishing) and ids[publishing] == ids.get(serving):
                out.append(
                    Finding(
                        "RENDER-IDENTITY",
                        f"{serving} pods would run as the {publishing}",
                        f"cluster.identities.{serving}",
                        "a pod that serves could then change what is served",
                        "give each its own identity",
                    )
                )
    return out


def _planes(plan: Plan) -> list[Finding]:
    for process in plan.processes:
        for key in ("ETCD_ENDPOINTS", "NATS_SERVER"):
            url = process.env.get(key, "")
            if any(host in url for host in ("127.0.0.1", "localhost", "[::1]")):
                return [
                    Finding(
                        "RENDER-PLANE-LOOPBACK",
                        f"{key} is an address of one machine",
                        f"{plan.source}: runtime",
                        f"{process.name} would look for {url} in its own pod",
                        "name the service of the cluster in runtime.etcd_url, runtime.nats_url",
                    )
                ]
    return []


def warnings(plan: Plan) -> list[str]:
    """What is rendered all the same, and what to know about it."""
    out = []
    loose = sorted({
        p.component for p in plan.processes
        if p.component in base.WORKERS and (p.config or {}).get("weights", {}).get("allow_unverified")
    })  # fmt: skip
    if loose:
        out.append(f"{', '.join(loose)}: the loader does not verify; admission refuses it in serving namespaces")
    trusts = [w["trust"]["require"] for p in plan.processes if (w := (p.config or {}).get("weights"))]
    if any(t != "approval" for t in trusts) and not loose:
        out.append("trust.require is not approval: admission refuses it in serving namespaces")
    if set(plan.release["manifest_digest"]) == {"0"}:
        out.append("model.manifest_digest is a placeholder: no such release will be found")
    return out
