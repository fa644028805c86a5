"""What is refused before it is rendered: it would deploy healthy and serve the wrong thing, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.errors import DynamoBlobError
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
