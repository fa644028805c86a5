"""deploy/README.md, walked as far as it goes without a cluster: every command line is one that exists, kubectl's own parser
reads what we render as we mean it, and what the text names is there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from graphs.cli import main as cli
from tests.golden import rendering

README = (rendering.ROOT / "deploy/README.md").read_text()
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed: its half of the path is not checked"
)


def commands(word: str) -> list[list[str]]:
    """Command lines of the README that start with `word`."""
    lines = (line.strip().split("        #")[0] for line in README.splitlines() if line.startswith("       "))
    return [shlex.split(line) for line in lines if line.startswith(word + " ")]


def kubectl(*args: str, **kwargs: Any) -> str:
    done = subprocess.run(["kubectl", *args], capture_output=True, text=True, timeout=60, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_render_command_writes_the_objects_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(rendering.ROOT)
    command = next(c for c in commands("dynamo") if c[1] == "render")
    out = tmp_path / "rendered"
    argv = [{"my-cluster.yaml": "deploy/cluster.example.yaml", "rendered/": str(out)}.get(a, a) for a in command[1:]]
    assert cli.main([*argv, "--json"]) == 0
    names = sorted(p.name for p in out.iterdir())
    assert json.loads(capsys.readouterr().out)["written"] == len(names)
    kinds = [n.split("-")[1] for n in names]
    order = [
        "validatingadmissionpolicy",
        "serviceaccount",
        "rolebinding",
        "networkpolicy",
        "daemonset",
        "dynamographdeployment",
    ]
    assert [k for k in dict.fromkeys(kinds) if k in order] == order
    assert kinds[-1] == "dynamographdeployment"  # nothing starts before what protects it


def test_rendering_again_leaves_nothing_of_the_last_time(tmp_path: Path) -> None:
    """`kubectl apply -f rendered/` applies every file there: an old graph under a higher number would win."""
    render = ["render", str(rendering.ROOT / "graphs/aks/gpt-oss-120b-h200.yaml"), "--cluster", str(rendering.CLUSTER)]
    again, fresh = tmp_path / "again", tmp_path / "fresh"
    assert cli.main([*render, "--out", str(again)]) == 0
    keep = {
        "kustomization.yaml": "resources: []\n",
        "20-daemonset-mine.yaml": "kind: DaemonSet\n",
        "21-odd-x.yaml": "a: [\n",
    }
    for name, text in keep.items():
        (again / name).write_text(text)
    other = "apiVersion: v1\nkind: Service\nmetadata: {labels: {app.kubernetes.io/part-of: other, app.kubernetes.io/managed-by: dynamo-blob}}\n"
    (again / "05-service-other-api.yaml").write_text(other)
    changed = ["--set", "components.frontend.replicas=1", "--set", "components.decode.drain_s=70"]
    assert cli.main([*render, *changed, "--out", str(again)]) == 0
    assert cli.main([*render, *changed, "--out", str(fresh)]) == 0
    ours = {p.name: p.read_text() for p in fresh.iterdir()}
    assert {p.name: p.read_text() for p in again.iterdir()} == {**ours, **keep, "05-service-other-api.yaml": other}


@pytest.mark.parametrize("place", ["/proc/nowhere", "a-file", "a-file/below"])
def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("")
    render = ["render", str(rendering.ROOT / "graphs/aks/gpt-oss-120b-h200.yaml"), "--cluster", str(rendering.CLUSTER)]
    assert cli.main([*render, "--out", place, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "RENDER-OUT" and place in error["where"] and error["why"] and error["do"]


def test_every_dynamo_verb_of_the_text_exists() -> None:
    verbs = set(re.findall(r"`dynamo ([a-z]+)", README)) | {c[1] for c in commands("dynamo")}
    assert {"render", "publish", "release", "plan"} <= verbs <= set(cli.verbs())


def test_every_file_of_the_text_exists() -> None:
    for path in re.findall(r"`((?:deploy|graphs|tests)/[\w./*-]+)`", README):
        assert list(rendering.ROOT.glob(path)), path


def test_the_names_of_the_text_are_rendered() -> None:
    text = (rendering.HERE / "rendered/gpt-oss-120b-h200.yaml").read_text()
    for name in (
        "gpt-oss-120b-tenants",
        "gpt-oss-120b-api",
        "app.kubernetes.io/part-of: gpt-oss-120b",
        "dynamo-blob.io/plan",
    ):
        assert name in text and name.split(": ")[-1] in README, name
    assert "dynamo-blob.io/serving" in (rendering.HERE / "rendered/admission.yaml").read_text()


@needs_kubectl
@pytest.mark.parametrize("name", ["disagg.yaml", "gpt-oss-120b-h200.yaml", "disagg.v1alpha1.yaml", "admission.yaml"])
def test_kubectls_parser_reads_what_we_mean(tmp_path: Path, name: str) -> None:
    text = (rendering.HERE / "rendered" / name).read_text()
    (tmp_path / "all.yaml").write_text(text)
    (tmp_path / "kustomization.yaml").write_text("resources: [all.yaml]\n")
    read = list(yaml.safe_load_all(kubectl("kustomize", str(tmp_path))))
    assert _by_name(read) == _by_name(rendering.documents(text))


@needs_kubectl
def test_kubectls_parser_would_show_a_lost_pair_of_quotes(tmp_path: Path) -> None:
    """Negative control: the same file with one pair of quotes lost is another object."""
    text = (rendering.HERE / "rendered/gpt-oss-120b-h200.yaml").read_text()
    assert 'value: "9090"' in text
    (tmp_path / "all.yaml").write_text(text.replace('value: "9090"', "value: 9090"))
    (tmp_path / "kustomization.yaml").write_text("resources: [all.yaml]\n")
    read = list(yaml.safe_load_all(kubectl("kustomize", str(tmp_path))))
    assert _by_name(read) != _by_name(rendering.documents(text))


@needs_kubectl
def test_namespace_and_secret_commands_are_accepted_by_kubectl(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text("tenants: {}\n")
    (tmp_path / "acme.salt").write_text("0" * 32)
    creates = [c for c in commands("kubectl") if "create" in c]
    assert len(creates) == 2
    for command in creates:
        item = yaml.safe_load(kubectl(*command[1:], "--dry-run=client", "-o", "yaml", cwd=tmp_path))
        if item["kind"] == "Secret":
            assert set(item["data"]) == {"example.yaml", "acme.salt"}
            volume = f"secretName: {item['metadata']['name']}"
            assert volume in (rendering.HERE / "rendered/gpt-oss-120b-h200.yaml").read_text()


def _by_name(items: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    return {(i["kind"], i["metadata"]["name"]): i for i in items}
