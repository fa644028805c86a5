"""docs/registry.md, "Publish → approve → serve → roll back": every command of it, run from the text, on a fresh store."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from components.common.registry.signing import SigningKey
from tests.e2e.graph import TINY, short_directory
from tests.registry_store import REPOSITORY

DOC = REPOSITORY / "docs" / "registry.md"
DYNAMO = f"{sys.executable} -m graphs.cli.main"
READY_S = 240.0
PORT = 25400  # Dynamo's runtime takes no system port above 32767, which ephemeral ones are


@dataclass
class Step:
    command: str
    prints: str
    fails: str


def steps() -> list[Step]:
    """The commands of the ```sh walk blocks, in order. `prints` and `fails` are about the last one of a block."""
    out = []
    for attributes, body in re.findall(r"^```sh walk(.*)\n((?:.*\n)*?)```$", DOC.read_text(), re.MULTILINE):
        prints, fails = re.search(r'prints="([^"]*)"', attributes), re.search(r"fails=(\S+)", attributes)
        *before, last = body.strip().splitlines()
        out += [Step(line, "", "") for line in before]
        out.append(Step(last, prints[1] if prints else "", fails[1] if fails else ""))
    return out


def graph_file(target: Path, port: int) -> None:
    """walk.yaml as the text has it, on ports of our own and with the tiny model's profile."""
    text = re.search(r"^```yaml walk.yaml\n((?:.*\n)*?)```$", DOC.read_text(), re.MULTILINE)
    assert text
    ours = {"base_port: 8100": f"base_port: {port}", "127.0.0.1:8000": f"127.0.0.1:{port + 90}", "smollm2-135m-cpu": "tiny-cpu"}  # fmt: skip
    written = text[1]
    for theirs, mine in ours.items():
        assert theirs in written
        written = written.replace(theirs, mine)
    target.write_text(written)


def test_the_text_has_the_walk() -> None:
    commands = " ".join(s.command for s in steps())
    for verb in (
        "publish", "approve", "promote", "verify", "serve", "status", "rollback", "audit", "retire", "collect",
    ):  # fmt: skip
        assert f"dynamo {verb}" in commands or f"dynamo release {verb}" in commands
    assert any(s.fails for s in steps()) and sum(bool(s.prints) for s in steps()) >= 6


@pytest.fixture
def place() -> Iterator[Path]:
    root = short_directory()
    yield root
    end = ["stop", "--all", "--now", "--state", str(root / "state")]
    subprocess.run([*DYNAMO.split(), *end], cwd=REPOSITORY, capture_output=True, timeout=200)
    shutil.rmtree(root, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_walk_as_written(place: Path) -> None:
    shutil.copytree(TINY, place / "model")
    graph_file(place / "walk.yaml", PORT)
    env = {**os.environ, "MODEL_DIR": str(place / "model"), "PYTHONPATH": str(REPOSITORY)}
    state = f"--state {place / 'state'}"

    def ours(command: str) -> str:
        """The command as this checkout runs it, on the test's own state."""
        if not command.startswith("dynamo "):
            return command
        verb = command.split()[1]
        graph = f" --graph {place / 'walk.yaml'}" if verb in ("publish", "release") else ""
        return f"{DYNAMO} {command.removeprefix('dynamo ')}{graph} {state}"

    def run(command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", ours(command)], cwd=place, env=env, capture_output=True, text=True, timeout=READY_S
        )
        said = done.stdout + done.stderr
        assert "Traceback" not in said, said
        return done.returncode, " ".join(said.split())

    status = ""
    for step in steps():
        if step.command.endswith("&"):
            with (place / "serve.log").open("wb") as log:
                subprocess.Popen(
                    ["bash", "-c", "exec " + ours(step.command.rstrip("& "))], cwd=place, env=env, stdout=log, stderr=log
                )  # fmt: skip
            end = time.monotonic() + READY_S
            while run("dynamo status")[0] != 0:
                assert time.monotonic() < end, (place / "serve.log").read_text()[-3000:]
                time.sleep(2)  # asking costs the starting graph a second of its cores
            continue
        code, said = run(step.command)
        if step.fails:
            assert code != 0 and step.fails in said, f"{step.command}\n{said}"
        else:
            assert code == 0 and " ".join(step.prints.split()) in said, f"{step.command}\n{said}"
        status = said if step.command == "dynamo status" else status
    approver = SigningKey.open(place / "state" / "keys" / "approver.pem").public
    listed = run("dynamo release show walk 1")[1]
    digest = re.search(r"manifest ([0-9a-f]{64})", listed)
    assert digest and f"manifest {digest[1][:16]}" in status and f"approved by {approver[:16]}" in status
    assert re.search(r"(\d+ min \d+ s|\d+ h \d+ min) ago", status), "how old the approval is"
