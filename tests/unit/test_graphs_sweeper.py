"""A sweeper beside every graph that keeps KV in Blob: in the plan, in the cluster, off when the graph says so."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from components.common.kv.sweeper_config import SweeperConfig
from components.common.kv.sweeper_ops import Ops, State
from graphs.compile import compile_plan
from graphs.load import read_graph
from graphs.plan import Plan, Process
from graphs.render.pods import pods
from graphs.site import Site
from tests.golden.rendering import plan_of

ROOT = Path(__file__).resolve().parents[2]
SITE = Site(run=Path("/s/runs/r"), state=Path("/s"), python="python3")
KV = "kv.profile=smollm2-135m-cpu"


def local(*sets: str) -> Plan:
    return compile_plan(read_graph(ROOT / "graphs/disagg.yaml", sets), SITE)


def sweepers(plan: Plan) -> list[Process]:
    return [p for p in plan.processes if p.component == "sweeper"]


def test_a_graph_with_kv_in_blob_has_one_and_one_without_has_none() -> None:
    assert sweepers(local()) == []
    (found,) = sweepers(local(KV))
    worker = next(p for p in local(KV).processes if p.component == "prefill")
    config = SweeperConfig.parse(found.config or {}, where="plan")
    settings = (worker.config or {})["kv"]["settings"]
    assert config.account.model_dump(mode="json") == settings["account"] and config.container == settings["container"]
    assert found.probe is not None and found.probe.http == f"http://{config.listen}/health"
    assert found.after == ("azurite-0",) and found.identity == "serving"
    assert all(path.endswith("serving.kv.json") for path in found.secrets), "it opens no weights"


def test_the_graph_switches_it_off_and_tunes_it() -> None:
    assert sweepers(local(KV, "components.sweeper.replicas=0")) == []
    one, two = sweepers(local(KV, "components.sweeper.replicas=2", "components.sweeper.sweep_s=7"))
    assert (one.config or {})["sweep_s"] == 7 and one.ports[0].number + 1 == two.ports[0].number


def test_in_a_cluster_it_is_a_pod_that_sees_the_tenants_file_but_no_salt_key() -> None:
    plan = plan_of(ROOT / "graphs/aks/gpt-oss-120b-h200.yaml")
    (pod,) = [p for p in pods(plan) if p.name == "sweeper"]
    secret = next(v["secret"] for v in pod.spec["volumes"] if v["name"] == "tenants")
    assert [i["key"] for i in secret["items"]] == ["example.yaml"]
    main = pod.main_container
    assert main["readinessProbe"]["httpGet"] == {"path": "/health", "port": 9090}
    assert main["livenessProbe"]["httpGet"] == {"path": "/live", "port": 9090}
    assert not any("gpu" in k for k in main["resources"]["limits"])
    off = plan_of(ROOT / "graphs/aks/gpt-oss-120b-h200.yaml", "components.sweeper.replicas=0")
    assert not [p for p in pods(off) if p.name == "sweeper"]


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as r:
            return r.status, r.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def test_health_is_the_last_turn() -> None:
    state = State()
    ops = Ops("127.0.0.1:0", state)
    try:
        assert get(ops.port, "/health") == (503, "no turn has ended yet") and get(ops.port, "/live")[0] == 200
        state.turn("", {"leading": 1, "sweeps": 3, "objects": 5})
        assert get(ops.port, "/health") == (200, "sweeping")
        text = get(ops.port, "/metrics")[1]
        assert "dynamo_blob_sweeper_sweeps_total 3\n" in text and "dynamo_blob_sweeper_objects 5\n" in text
        state.turn("", {"leading": 0})
        assert get(ops.port, "/health")[1].startswith("standing by")
        state.turn("STORAGE-DOWN: no answer", {})
        assert get(ops.port, "/health") == (503, "STORAGE-DOWN: no answer")
        assert get(ops.port, "/else")[0] == 404
        with pytest.raises(OSError, match="in use"):
            Ops(f"127.0.0.1:{ops.port}", State())
    finally:
        ops.close()
