"""What is refused before it is rendered: it would deploy healthy and serve the wrong thing, or nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from components.common.errors import DynamoBlobError
from graphs.cli.main import main
from graphs.cli.render import cluster_plan
from graphs.render.output import manifests
from tests.golden import rendering

GRAPH = str(rendering.ROOT / "graphs/disagg.yaml")
LOCAL = dict(s.split("=", 1) for s in rendering.LOCAL)


def render(cluster: Path = rendering.CLUSTER, graph: str = GRAPH, **sets: str) -> None:
    values = {**LOCAL, **{k.replace("__", "."): v for k, v in sets.items()}}
    manifests(cluster_plan(graph, [f"{k}={v}" for k, v in values.items() if v != "-"], cluster))


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = rendering.CLUSTER.read_text()
    assert old in text
    path = tmp_path / "cluster.yaml"
    path.write_text(text.replace(old, new))
    return path


def test_the_sound_one_is_rendered() -> None:
    render()


@pytest.mark.parametrize(
    ("code", "sets"),
    [
        ("RENDER-RELEASE-UNPINNED", {"model__manifest_digest": "-"}),
        ("RENDER-OPEN-GATEWAY", {"components__frontend__auth": "none"}),
        ("RENDER-GRACE", {"components__decode__drain_s": "60", "components__decode__grace_s": "50"}),
        ("RENDER-PLANE-LOOPBACK", {"runtime__discovery": "etcd", "runtime__etcd_url": "http://127.0.0.1:2379"}),
    ],
)
def test_a_graph_is_refused(code: str, sets: dict[str, str]) -> None:
    with pytest.raises(DynamoBlobError, match=code) as e:
        render(**sets)
    assert e.value.where and e.value.do


@pytest.mark.parametrize(
    ("code", "old", "new"),
    [
        ("RENDER-IMAGE-UNPINNED", "dynamo-blob-worker@sha256:" + "2" * 64, "dynamo-blob-worker:v1"),
        ("RENDER-NO-ACCOUNT", "  kv: https://examplekv.blob.core.windows.net", ""),
        ("RENDER-NO-KEYS", '["' + "3" * 64 + '"]', "[]"),
        ("RENDER-NO-IDENTITY", "  weights: {client_id: 00000000-0000-0000-0000-000000000002}", ""),
        ("RENDER-IDENTITY", "000000000003", "000000000001"),
        ("GRAPH-UNKNOWN-KEY", "api_server_cidr", "apiserver_cidr"),
        ("GRAPH-WRONG-VALUE", "10.20.0.0/28", "everywhere"),
        (
            "GRAPH-WRONG-VALUE",
            "10.20.0.0/28",
            "10.20.0.0/64",
        ),  # the API server would refuse the policy, after half was applied
        ("GRAPH-WRONG-VALUE", "10.20.0.0/28", "10.20.0.256/28"),
        (
            "GRAPH-WRONG-VALUE",
            "00000000-0000-0000-0000-000000000001",
            "serving-identity",
        ),  # a name where the id belongs
        ("GRAPH-WRONG-VALUE", "  decode: registry", "  decod: registry"),  # decode would run the image without CUDA
    ],
)
def test_a_cluster_is_refused(tmp_path: Path, code: str, old: str, new: str) -> None:
    kv = {"kv__profile": "smollm2-135m-cpu"} if code == "RENDER-NO-ACCOUNT" else {}
    with pytest.raises(DynamoBlobError, match=code) as e:
        render(edited(tmp_path, old, new), **kv)
    assert e.value.where


def test_a_graph_without_a_cluster_says_how_to_give_one() -> None:
    with pytest.raises(DynamoBlobError, match="RENDER-NO-CLUSTER") as e:
        cluster_plan(GRAPH)
    assert "--cluster" in e.value.do


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ("dynamo-blob@sha256:" + "1" * 64, "dynamo-blob:v1", "CHECK-IMAGE-UNPINNED", "default:"),
        (
            "monitoring_namespace",
            "termination_grace_s: 5\nmonitoring_namespace",
            "CHECK-DRAIN-CLUSTER",
            "termination_grace_s:",
        ),
        (
            '"' + "3" * 64 + '"',
            '""',
            "CHECK-TRUST-KEY",
            "approver_keys:",
        ),  # admission would take it; no release ever counts
        ("require: approval", "require: none", "CHECK-TRUST", "require:"),
        ("000000000003", "000000000001", "RENDER-IDENTITY", "serving:"),
        ("private_endpoint_cidr: 10.20.1.0/28", "", "RENDER-NO-CIDR", "namespace:"),
    ],
)
def test_what_the_cluster_file_says_is_blamed_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, code: str, line: str
) -> None:
    cluster = edited(tmp_path, old, new)
    graph = str(rendering.ROOT / "graphs/aks/gpt-oss-120b-h200.yaml")
    assert main(["render", graph, "--cluster", str(cluster), "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    file, number, _ = error["where"].rsplit(":", 2)
    assert (error["code"], file) == (code, str(cluster))
    assert cluster.read_text().splitlines()[int(number) - 1].lstrip().startswith(line)


def test_an_empty_cluster_file_says_how_to_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("")
    graph = str(rendering.ROOT / "graphs/aks/gpt-oss-120b-h200.yaml")
    assert main(["render", graph, "--cluster", str(tmp_path / "c.yaml"), "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "GRAPH-INVALID" and "mapping" in error["what"] and "cluster.example.yaml" in error["do"]


def test_the_azure_librarys_log_stands_in_nobodys_way() -> None:
    """Without a handler Python prints a library's warnings: thirty lines above each finding of `check --live`."""
    text = "import logging, sys; from graphs.cli.main import main; main(['version']); logging.getLogger('azure.identity._x').warning('noise')"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, cwd=rendering.ROOT)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("dynamo-blob ")


def test_a_release_without_approval_is_rendered_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = str(rendering.ROOT / "graphs/aks/gpt-oss-120b-h200.yaml")
    cluster = edited(tmp_path, "require: approval", "require: signature")
    assert main(["render", graph, "--cluster", str(cluster)]) == 0
    assert "admission refuses" in capsys.readouterr().err
    assert main(["render", graph, "--cluster", str(rendering.CLUSTER)]) == 0
    assert "admission refuses" not in capsys.readouterr().err
