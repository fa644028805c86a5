"""Seconds from `dynamo serve` to the first answer, by phase: cold (nothing published) and warm.

Each round starts the disaggregated graph twice in one fresh state directory: first with an empty store
(cold: publish, then stream), then again (warm). The sample model itself is made beforehand. The phases
come from the launcher's own clock, the same that the table of `--smoke` shows; an answer counts only if
every hop of the smoke was proven.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import Report

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / ".state/models/smollm2-135m-instruct"
PORT = 22800


def bench(report: Report, quick: bool) -> None:
    from tools.sample_model import build

    build(SAMPLE)
    report.server = "azurite"
    for round_ in range(1 if quick else 5):
        with tempfile.TemporaryDirectory(prefix="serve-phases-") as state:
            for variant in ("cold", "warm"):
                wall, result = _start(Path(state))
                for phase in result["phases"]:
                    report.add(phase["name"], variant, round_, phase["end_s"] - phase["start_s"], "s")
                report.add("first answer from start", variant, round_, result["phases"][-1]["end_s"], "s")
                report.add("command, start to exit", variant, round_, wall, "s")
    report.note("phases overlap: workers import while the store and the weight service start")


def _start(state: Path) -> tuple[float, dict[str, Any]]:
    out = state / "smoke.json"
    began = time.monotonic()
    subprocess.run(
        [
            sys.executable, "-m", "graphs.cli.main", "serve", "graphs/disagg.yaml", "--quiet", "--state", str(state),
            "--smoke", "What is the capital of France?", "--json", str(out),
            "--set", f"network.base_port={PORT + 10}", "--set", f"components.frontend.listen=127.0.0.1:{PORT}", "--set", f"model.source={SAMPLE}",
        ],
        cwd=ROOT, check=True, timeout=900,
    )  # fmt: skip
    return time.monotonic() - began, json.loads(out.read_text())
