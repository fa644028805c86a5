"""The pre-commit hook and the CI snippets: what stands in them is run as it stands, on sound graphs and on a broken one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SNIPPETS = {"github-actions": "run", "azure-pipelines": "script"}


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def steps(name: str) -> list[dict[str, Any]]:
    jobs = read(f"deploy/ci/{name}.yml")["jobs"]
    return list((jobs["check"] if isinstance(jobs, dict) else jobs[0])["steps"])


def commands(name: str) -> list[str]:
    return [s[SNIPPETS[name]] for s in steps(name) if SNIPPETS[name] in s]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a fresh checkout has after the install step, by links; graphs and deploy are copies."""
    for name in ("graphs", "deploy"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".venv", "configs", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def sh(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def broken(checkout: Path) -> Path:
    path = checkout / "graphs/disagg.yaml"
    text = path.read_text()
    assert "decode: {replicas: 1}" in text
    path.write_text(text.replace("decode: {replicas: 1}", "decode: {replicas: 1, engine: {block_size: 64}}"))
    return path


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_commands_of_a_snippet_run_and_refuse_a_broken_graph(name: str, checkout: Path) -> None:
    install, check, render = commands(name)
    assert install == "tools/install.sh" and os.access(ROOT / install, os.X_OK)
    for command in (check, render):
        done = sh(command, checkout)
        assert done.returncode == 0, done.stdout + done.stderr
    assert list((checkout / "build/rendered").glob("*-dynamographdeployment-*.yaml"))
    lines = broken(checkout).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "block_size: 64" in text)
    done = sh(check, checkout)
    assert done.returncode == 1 and re.search(r"CHECK-BLOCK-SIZE", done.stdout), done.stdout
    assert f"graphs/disagg.yaml:{line}:" in done.stdout


def test_both_snippets_do_the_same_and_keep_what_they_rendered() -> None:
    assert commands("github-actions") == commands("azure-pipelines")
    uploads = [s["with"]["path"] for s in steps("github-actions") if "upload-artifact" in s.get("uses", "")]
    published = [s["publish"] for s in steps("azure-pipelines") if "publish" in s]
    assert uploads == published == ["build/rendered"]


def test_no_snippet_has_a_key_that_its_service_does_not_know() -> None:
    assert {k for s in steps("github-actions") for k in s} <= {"name", "uses", "run", "with", "env", "if"}
    assert {k for s in steps("azure-pipelines") for k in s} <= {
        "task",
        "inputs",
        "script",
        "displayName",
        "publish",
        "artifact",
    }
    workflow = read("deploy/ci/github-actions.yml")
    assert set(workflow) == {"name", True, "permissions", "jobs"}, (
        "`on` is a boolean to YAML 1.1; GitHub reads it as a word"
    )
    assert workflow["jobs"]["check"]["runs-on"] and set(workflow[True]) == {"pull_request"}


def test_the_pre_commit_hook_as_pre_commit_runs_it(checkout: Path) -> None:
    """pre-commit appends the changed files that match `files` to `entry`."""
    (hook,) = read(".pre-commit-hooks.yaml")
    assert {"id", "name", "entry", "language"} <= set(hook) and hook["language"] == "system"
    changed = [
        str(p.relative_to(checkout))
        for p in checkout.rglob("*.yaml")
        if ".venv" not in str(p) and "configs" not in str(p)
    ]
    files = sorted(p for p in changed if re.search(hook["files"], p))
    assert "graphs/disagg.yaml" in files and "graphs/aks/gpt-oss-120b-h200.yaml" in files
    assert not any(p.startswith("deploy") for p in files)
    command = shlex.join([*shlex.split(hook["entry"]), *files])
    done = sh(command, checkout)
    assert done.returncode == 0, done.stdout
    broken(checkout)
    done = sh(command, checkout)
    assert done.returncode == 1 and "CHECK-BLOCK-SIZE" in done.stdout
