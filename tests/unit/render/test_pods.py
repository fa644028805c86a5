"""Pods: what the plan states stands in the container; what a cluster adds is a short list."""

from __future__ import annotations

import json
from typing import Any

import pytest

from components.common.errors import DynamoBlobError
from graphs.plan import Plan, Process
from graphs.render.base import Pod
from graphs.render.output import manifests
from graphs.render.pods import CLUSTER_ENV, collapse, config_files, pods
from tests.golden import rendering

DISAGG = rendering.ROOT / "graphs/disagg.yaml"
GPU = rendering.ROOT / "graphs/aks/gpt-oss-120b-h200.yaml"


def named(plan: Plan) -> dict[str, Pod]:
    return {p.name: p for p in pods(plan)}


def containers(pod: Pod) -> dict[str, dict[str, Any]]:
    found = {c["name"]: c for c in pod.spec.get("initContainers", []) + pod.spec["containers"]}
    found.pop("node-dirs", None)
    return found


def processes(pod: Pod) -> dict[str, Process]:
    return {"main": pod.main, **{p.component: p for p in pod.sidecars}}


@pytest.mark.parametrize("graph", [DISAGG, GPU], ids=lambda g: g.stem)
def test_argv_environment_and_files_are_the_plans(graph: Any) -> None:
    plan = rendering.plan_of(graph)
    for pod in pods(plan):
        for name, process in processes(pod).items():
            c = containers(pod)[name]
            assert (*c["command"], *c["args"]) == process.argv
            env = {e["name"]: e.get("value") for e in c["env"]}
            assert {k: v for k, v in env.items() if k not in (*CLUSTER_ENV, "HOME")} == process.env
            assert c["workingDir"] == process.cwd
            if process.config is not None:
                text = config_files(plan)[process.config_path.rpartition("/")[2]]
                assert json.loads(text) == process.config


def test_the_pods_address_is_defined_before_it_is_used() -> None:
    for pod in pods(rendering.plan_of(DISAGG)):
        for c in containers(pod).values():
            names = [e["name"] for e in c["env"]]
            for e in c["env"]:
                if "$(POD_IP)" in e.get("value", ""):
                    assert names.index("POD_IP") < names.index(e["name"])


def test_replicas_are_counted_and_must_be_equal() -> None:
    plan = rendering.plan_of(rendering.ROOT / "graphs/disagg-2p2d.yaml")
    assert {k: n for k, (_, n) in collapse(plan).items()} == {
        "weights": 1, "prefill": 2, "decode": 2, "router": 1, "dynamo-frontend": 1, "frontend": 1,
    }  # fmt: skip
    assert named(plan)["prefill"].replicas == 2
    odd = tuple(
        p.model_copy(update={"env": {**p.env, "ODD": "1"}}) if p.name == "prefill-1" else p for p in plan.processes
    )
    with pytest.raises(DynamoBlobError, match="RENDER-REPLICAS-DIFFER") as e:
        collapse(plan.model_copy(update={"processes": odd}))
    assert "env" in e.value.why


def test_a_worker_states_gpus_shared_memory_probes_and_grace() -> None:
    plan = rendering.plan_of(GPU)
    decode = named(plan)["decode"]
    process = next(p for p in plan.processes if p.name == "decode-0")
    main = decode.main_container
    assert main["resources"]["limits"]["nvidia.com/gpu"] == "1" == main["resources"]["requests"]["nvidia.com/gpu"]
    assert decode.shm_bytes == process.shm_bytes >= 96 * 2**30
    assert main["readinessProbe"]["httpGet"] == {"path": "/health", "port": 9090}
    assert main["livenessProbe"]["httpGet"] == {"path": "/live", "port": 9090}
    startup = main["startupProbe"]
    assert process.probe is not None
    assert startup["periodSeconds"] * startup["failureThreshold"] >= process.probe.deadline_s
    assert decode.spec["terminationGracePeriodSeconds"] >= process.grace_s > process.drain_s == 90
    memory = int(main["resources"]["limits"]["memory"].removesuffix("Mi")) * 2**20
    assert memory >= process.memory_bytes + process.config["weights"]["budget_bytes"]  # type: ignore[index]
    assert decode.spec["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_pod_grace_covers_the_gateways_drain_and_then_the_frontends() -> None:
    frontend = named(rendering.plan_of(DISAGG, "components.frontend.drain_s=300"))["frontend"]
    behind = frontend.sidecars[0]
    assert frontend.spec["terminationGracePeriodSeconds"] == 330 + behind.drain_s
    sidecar = frontend.spec["initContainers"][0]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("dynamo-frontend", "Always")  # starts first, ends last
    assert "ports" not in sidecar  # loopback only
    assert not {"livenessProbe", "readinessProbe", "startupProbe"} & set(sidecar)  # the kubelet cannot reach loopback


def test_identities_go_to_pods_that_need_them_only() -> None:
    found = named(rendering.plan_of(GPU))
    use = "azure.workload.identity/use"
    assert {n: p.service_account.rpartition("-")[2] for n, p in found.items()} == {
        "frontend": "weights", "prefill": "serving", "decode": "serving", "router": "runtime", "weights": "weights",
        "sweeper": "serving",
    }  # fmt: skip
    assert {n for n, p in found.items() if p.labels.get(use) == "true"} == {
        "frontend", "prefill", "decode", "weights", "sweeper",
    }  # fmt: skip
    assert all(
        s["podTemplate"]["spec"]["serviceAccountName"] for s in deployment(rendering.plan_of(GPU))["spec"]["components"]
    )


def deployment(plan: Plan) -> dict[str, Any]:
    return next(m for m in manifests(plan) if m["kind"] == "DynamoGraphDeployment")


def test_the_node_cache_is_written_by_the_weight_service_and_read_by_workers() -> None:
    plan = rendering.plan_of(DISAGG)
    found = named(plan)
    host = {"path": "/dev/shm/dynamo-blob/cache/disagg", "type": "DirectoryOrCreate"}
    for name in ("weights", "prefill", "decode"):
        assert next(v for v in found[name].spec["volumes"] if v["name"] == "cache")["hostPath"] == host
        mount = next(m for m in found[name].main_container["volumeMounts"] if m["name"] == "cache")
        assert mount.get("readOnly", False) is (name != "weights")
        assert mount["mountPath"] == "/var/cache/dynamo-blob"
    budget = found["weights"].main.config["cache_bytes"]  # type: ignore[index]
    limit = int(found["weights"].main_container["resources"]["limits"]["memory"].removesuffix("Mi")) * 2**20
    assert limit >= budget > 0
    owner = found["weights"].spec["securityContext"]["runAsUser"]
    assert owner != found["prefill"].spec["securityContext"]["runAsUser"]  # no worker owns what it maps
    assert owner == found["weights"].main.config["cache_uid"]  # type: ignore[index]
    assert {found[n].main.config["weights"]["sealed_uid"] for n in ("prefill", "decode")} == {owner}  # type: ignore[index]
    assert "frontend" not in {n for n, p in found.items() if any(v.get("hostPath") for v in p.spec["volumes"])}


def test_where_host_paths_are_forbidden_the_service_stands_in_the_workers_pod(tmp_path: Any) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(rendering.CLUSTER.read_text() + "cache_mode: sidecar\n")
    plan = rendering.plan_of(DISAGG, cluster=cluster)
    found = named(plan)
    assert set(found) == {"frontend", "prefill", "decode", "router"}
    text = json.dumps(manifests(plan))
    assert "hostPath" not in text and "DaemonSet" not in text
    for name in ("prefill", "decode"):
        sidecar = next(c for c in found[name].spec["initContainers"] if c["name"] == "weights")
        assert sidecar["restartPolicy"] == "Always" and sidecar["securityContext"]["runAsUser"] == 64123
        cache = next(v for v in found[name].spec["volumes"] if v["name"] == "cache")
        assert cache["emptyDir"] == {"medium": "Memory", "sizeLimit": "2048Mi"}
        mounts = {
            c["name"]: next(m for m in c["volumeMounts"] if m["name"] == "cache")
            for c in containers(found[name]).values()
        }
        assert mounts["main"].get("readOnly") is True and "readOnly" not in mounts["weights"]


def test_workers_see_no_salt_key() -> None:
    found = named(rendering.plan_of(GPU))
    tenants = {n: next((v for v in p.spec["volumes"] if v["name"] == "tenants"), None) for n, p in found.items()}
    assert "items" not in tenants["frontend"]["secret"]  # type: ignore[index]
    assert tenants["prefill"]["secret"]["items"] == [{"key": "example.yaml", "path": "example.yaml"}]  # type: ignore[index]
    assert tenants["router"] is None and tenants["weights"] is None


def test_a_changed_setting_changes_the_pods_that_run_it() -> None:
    """The plan's digest stands on every pod, and plan files are named by content: a change rolls the pods."""
    before, after = (named(rendering.plan_of(DISAGG, *s)) for s in ((), ("components.router.host_hit_weight=0.5",)))
    digest = "dynamo-blob.io/plan-digest"
    assert before["router"].annotations[digest] != after["router"].annotations[digest]
    maps = [
        next(v for v in p["router"].spec["volumes"] if v["name"] == "plans")["configMap"]["name"]
        for p in (before, after)
    ]
    assert maps[0] != maps[1]
