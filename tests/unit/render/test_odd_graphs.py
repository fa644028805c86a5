"""Odd graphs, odd surroundings: the same bytes everywhere, nothing rendered that `check` refuses, names and values that survive the cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.common.errors import DynamoBlobError
from graphs.check import check_graph
from graphs.cli.main import main
from graphs.render.output import manifests, to_yaml
from graphs.render.pods import literal
from tests.golden import rendering, schemas

AKS = rendering.ROOT / "graphs/aks/gpt-oss-120b-h200.yaml"
DISAGG = rendering.ROOT / "graphs/disagg.yaml"


def test_the_same_bytes_in_every_directory_locale_and_hash_seed(tmp_path: Path) -> None:
    """Two fresh processes that share nothing but the file."""
    argv = [sys.executable, "-m", "graphs.cli.main", "render", str(AKS), "--cluster", str(rendering.CLUSTER)]
    texts = []
    for cwd, more in (
        (rendering.ROOT, {"LC_ALL": "C", "PYTHONHASHSEED": "1", "TZ": "UTC"}),
        (tmp_path, {"LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo", "PYTHONUTF8": "0"}),
    ):
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(rendering.ROOT), "HOME": str(cwd), **more}
        done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1] and len(texts[0]) > 10_000


def expanded(text: str, known: dict[str, str]) -> str:
    """What the kubelet makes of a value: the rules of k8s.io/kubernetes/third_party/forked/golang/expansion."""

    def one(m: re.Match[str]) -> str:
        if m[0] == "$$":
            return "$"
        return known.get(m[1], m[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


@pytest.mark.parametrize("text", ["$(HOME)", "$$", "$$$", "a$b", "$", "$(", "$$(HOME)", "$(A)$(B)$$$(C)", "50 $ and 100 $$", "", "$(POD_IP"])  # fmt: skip
def test_a_value_arrives_in_the_pod_as_it_stands_in_the_graph(text: str) -> None:
    known = {"HOME": "/root", "A": "1", "B": "2", "C": "3", "POD_IP": "10.0.0.1"}
    assert expanded(literal(text), known) == text
    assert expanded(literal("$(POD_IP)"), known) == "10.0.0.1", "ours is meant to be expanded"


WORDS = [
    "$(HOME) $$",
    "on",
    "0x1F",
    "1_000",
    "né 模型 🚀",
    "a: b # c",
    "'\"",
    "  x ",
    "tab\there",
    "2026-11-29",
    "@{}[]&*!|>%",
]


def test_values_of_an_environment_survive_yaml_and_the_kubelet() -> None:
    plan = rendering.plan_of(DISAGG)
    decode = next(p for p in plan.processes if p.name == "decode-0")
    env = {**decode.env, **{f"ODD_{i}": w for i, w in enumerate(WORDS)}, "EMPTY": "", "LONG": "x" * 9000}
    changed = tuple(p.model_copy(update={"env": env}) if p is decode else p for p in plan.processes)
    items = rendering.documents(to_yaml(manifests(plan.model_copy(update={"processes": changed}), admit=False)))
    graph = next(i for i in items if i["kind"] == "DynamoGraphDeployment")
    pod = next(p for p in schemas.templates(graph) if p["metadata"]["name"] == "decode")
    found = {
        e["name"]: expanded(e["value"], {"POD_IP": "$(POD_IP)"})
        for e in pod["spec"]["containers"][0]["env"]
        if "value" in e
    }
    assert {k: found[k] for k in env if k != "HOME"} == {k: v for k, v in env.items() if k != "HOME"}
    assert schemas.faults(graph) == []


@pytest.mark.parametrize("name", ["模型", 'a "b" #c', "x" * 128, "-", "a\u00a0b"])
def test_any_name_of_a_model_is_rendered_as_it_is(name: str) -> None:
    plan = rendering.plan_of(DISAGG).model_copy(update={"served_model": name})
    items = rendering.documents(to_yaml(manifests(plan, admit=False)))
    graph = next(i for i in items if i["kind"] == "DynamoGraphDeployment")
    assert {p["metadata"]["annotations"]["dynamo-blob.io/model"] for p in schemas.templates(graph)} == {name}
    assert [f for i in items for f in schemas.faults(i)] == []


DNS = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")


@pytest.mark.parametrize("name", ["a", "a" * 40, "a-" + "b" * 36 + "-c"])
def test_no_name_is_too_long_for_its_kind(name: str) -> None:
    for item in manifests(rendering.plan_of(AKS, f"graph={name}"), admit=False):
        own, labels = item["metadata"]["name"], item["metadata"].get("labels", {})
        most = 63 if item["kind"] in ("Service", "DynamoGraphDeployment", "DaemonSet", "PodDisruptionBudget") else 253
        assert DNS.match(own) and len(own) <= most, own
        assert all(len(v) <= 63 for v in labels.values())


@pytest.mark.parametrize("name", ["a" * 41, "-a", "A", "模型", "a_b", "", "a."])
def test_a_name_that_no_cluster_takes_is_no_graph_name(name: str) -> None:
    found = check_graph(AKS, [f"graph={name!r}"])
    assert [f.code for f in found] == ["GRAPH-WRONG-VALUE"]


def test_a_dynamo_namespace_that_no_label_holds_is_refused(tmp_path: Path) -> None:
    cluster = tmp_path / "c.yaml"
    for length, refused in ((63 - 41, False), (63 - 40, True)):
        cluster.write_text(
            rendering.CLUSTER.read_text().replace("namespace: inference", "namespace: " + "n" * length, 1)
        )
        plan = rendering.plan_of(AKS, f"graph={'g' * 40}", cluster=cluster)
        if refused:
            with pytest.raises(DynamoBlobError, match="RENDER-NAME-LENGTH"):
                manifests(plan)
        else:
            manifests(plan)


def test_many_replicas_are_many_pods_and_no_clash_of_ports() -> None:
    sets = [f"components.{c}.replicas=64" for c in ("frontend", "router", "prefill", "decode")]
    assert check_graph(AKS, sets) == []
    few, many = (list(manifests(rendering.plan_of(AKS, *s), admit=False)) for s in ([], sets))
    graph = many[-1]
    assert {c["name"]: c["replicas"] for c in graph["spec"]["components"]} == dict.fromkeys(
        ("frontend", "prefill", "decode", "router"), 64
    ) | {"sweeper": 1}
    assert len(to_yaml(many)) < 1.1 * len(to_yaml(few)), "one template, however many pods"
    local = check_graph(DISAGG, ["components.decode.replicas=64"])
    assert "CHECK-REPLICAS" in {f.code for f in local}, "one machine has no ports for so many"
    assert [f.code for f in check_graph(AKS, ["components.decode.replicas=65"])] == ["GRAPH-WRONG-VALUE"]


@pytest.mark.parametrize("gone", ["components.router=null", "kv=null", "components.weights.replicas=0", "components.weights.cache_bytes=0"])  # fmt: skip
def test_optional_sections_may_be_missing(gone: str) -> None:
    sets = [gone, "components.weights.cache_bytes=0"] if "replicas" in gone else [gone]
    assert [f for f in check_graph(AKS, sets) if f.severity == "error"] == []
    items = manifests(rendering.plan_of(AKS, *sets))
    assert [f for i in items for f in schemas.faults(i)] == []


def cli(capsys: pytest.CaptureFixture[str], *sets: str, graph: Path = AKS) -> tuple[int, str]:
    argv: list[Any] = ["render", str(graph), "--cluster", str(rendering.CLUSTER), "--no-admission"]
    code = main([*argv, *[x for s in sets for x in ("--set", s)]])
    out = capsys.readouterr()
    assert (code == 0) == bool(out.out), "all of it, or nothing"
    return code, out.err


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("components.decode.engine={block_size: 64}", "CHECK-BLOCK-SIZE"),
        ("components.router.block_size=64", "CHECK-ROUTER-BLOCK-SIZE"),
        ("components.decode=null", "CHECK-POOL-MISSING"),
        ("components.prefill.replicas=0", "CHECK-POOL-EMPTY"),
        ("components.frontend.replicas=0", "CHECK-POOL-EMPTY"),
        ("components.decode.gpus=2", "CHECK-GPUS"),
        ("components.decode.drain_s=600", "CHECK-DRAIN-CLUSTER"),
        ("components.decode.env={'A B': x}", "CHECK-ENV-NAME"),
    ],
)
def test_what_check_refuses_is_not_rendered(change: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(capsys)[0] == 0
    status, err = cli(capsys, change)
    assert status == 1 and err.startswith(code), err


def test_the_fake_engine_is_not_rendered_for_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    status, err = cli(capsys, *rendering.LOCAL, graph=rendering.ROOT / "graphs/mock.yaml")
    assert status == 1 and err.startswith("CHECK-MOCK-CLUSTER")
