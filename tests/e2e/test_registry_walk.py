"""docs/registry.md, "Publish → approve → serve → roll back": every command of it, run from the text, on a fresh store."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.registry_store import REPOSITORY, free_port, write_model

DOC = REPOSITORY / "docs" / "registry.md"
GRAPH = """\
graph: walk
model: {{name: walk}}
storage:
  embedded: azurite
  weights: {{container: weights}}
  kv: {{container: kv-default}}
network: {{base_port: {port}}}
engine: {{profile: smollm2-135m-cpu}}
components:
  frontend: {{listen: 127.0.0.1:{front}, auth: none}}
  router: {{}}
  weights: {{}}
  prefill: {{replicas: 1}}
  decode: {{replicas: 1}}
"""


@dataclass
class Step:
    command: str
    prints: str
    fails: str


def steps() -> list[Step]:
    """The commands of the ```sh walk blocks, in order."""
    out = []
    for attributes, body in re.findall(r"^```sh walk(.*)\n((?:.*\n)*?)```$", DOC.read_text(), re.MULTILINE):
        prints, fails = re.search(r'prints="([^"]*)"', attributes), re.search(r"fails=(\S+)", attributes)
        lines = body.strip().splitlines()
        out += [
            Step(
                line,
                prints[1] if prints and i == len(lines) - 1 else "",
                fails[1] if fails and i == len(lines) - 1 else "",
            )
            for i, line in enumerate(lines)
        ]
    return out


def test_the_text_has_the_walk() -> None:
    commands = " ".join(s.command for s in steps())
    for verb in ("publish", "approve", "promote", "verify", "rollback", "audit", "retire", "collect"):
        assert verb in commands
    assert any(s.fails for s in steps()) and sum(bool(s.prints) for s in steps()) >= 4


@pytest.mark.slow
def test_the_walk_as_written(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    base = free_port()
    graph = tmp_path / "graph.yaml"
    graph.write_text(GRAPH.format(port=min(base, 60000), front=min(base, 60000) + 90))
    dynamo = f"{sys.executable} -m graphs.cli.main"
    env = {**os.environ, "MODEL_DIR": str(tmp_path / "model"), "PYTHONPATH": str(REPOSITORY)}
    for step in steps():
        command = step.command
        if command.startswith("dynamo "):
            command = f"{dynamo} {command.removeprefix('dynamo ')} --graph {graph} --state {tmp_path / 'state'}"
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )
        said = done.stdout + done.stderr
        assert "Traceback" not in said
        if step.fails:
            assert done.returncode != 0 and step.fails in said, f"{step.command}\n{said}"
        else:
            assert done.returncode == 0 and step.prints in said, f"{step.command}\n{said}"
