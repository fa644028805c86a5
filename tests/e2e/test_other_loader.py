"""A graph whose engine loads weights the way vLLM does by itself: it answers, and everything says that it is unverified."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.graph import DYNAMO, ROOT, TINY, served

pytestmark = pytest.mark.slow

MARK = "[UNVERIFIED loader auto"
SETS = (
    "engine.loader=auto",
    "engine.allow_unverified=true",
    "components.router=null",
    "components.aggregated.env.DYNAMO_BLOB_ZYGOTE=off",
)


def test_loader_auto_answers_and_status_is_marked(tmp_path: Path) -> None:
    with served(
        "aggregated", tmp_path, model="tiny-full", directory=TINY, profile="tiny-cpu", sets=SETS, port=26100
    ) as graph:
        answer = asyncio.run(graph.ask(messages=[{"role": "user", "content": "Hello"}], max_tokens=4, temperature=0))
        assert answer["usage"]["completion_tokens"] == 4
        plan = graph.plan()
        shown = subprocess.run(
            [*DYNAMO, "status", "--state", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
        ).stdout
        assert MARK in " ".join(shown.split())
        worker = graph.process("aggregated-0")["config"]
        digest = plan["release"]["weights_digest"]
        model = Path(worker["weights"]["root"]) / "whole" / digest
        assert (model / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
        report = json.loads(Path(worker["weights"]["report"]).read_text())
        assert report["unverified"] and report["loader"] == "auto"
        assert report["verified_bytes"] == report["manifest_bytes"] > 0, "each range was right when it arrived"


def test_it_is_refused_without_the_word(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DYNAMO, "serve", "graphs/aggregated.yaml", "--quiet", "--state", str(tmp_path), "--set", "engine.loader=auto"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0 and "CHECK-UNVERIFIED-LOADER" in done.stderr
