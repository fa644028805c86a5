"""`dynamo serve --smoke`: every hop proven by the part's own counters; a broken hop has its code."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.e2e.graph import DYNAMO, ROOT, SAMPLE, TINY, base_port, settings, short_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
QUESTION = "What is the capital of France?"


def smoke(tmp_path, graph: str, model: str, directory, profile: str, *sets: str) -> tuple[int, dict, str]:
    out, state = tmp_path / "smoke.json", short_directory()
    done = subprocess.run(
        [
            *DYNAMO, "serve", f"graphs/{graph}.yaml", "--smoke", QUESTION, "--json", str(out), "--quiet", "--state", str(state),
            *settings(base_port(), model, directory, profile), *[x for s in sets for x in ("--set", s)],
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=560,
    )  # fmt: skip
    shutil.rmtree(state, ignore_errors=True)
    assert out.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, json.loads(out.read_text()), done.stderr


def test_every_hop_of_the_default_graph_is_proven(tmp_path):
    code, result, err = smoke(tmp_path, "disagg", "smollm2-135m-instruct", SAMPLE, "smollm2-135m-cpu")
    assert code == 0, (err, result.get("failed"))
    assert "Paris" in result["answer"]
    weights, kv, router = result["weights"], result["kv"], result["router"]
    size = sum(f.stat().st_size for f in SAMPLE.iterdir())
    assert weights["manifest_bytes"] == weights["verified_bytes"] == size
    assert weights["store_bytes"] >= (SAMPLE / "model.safetensors").stat().st_size
    assert kv["nixl_bytes"] > 0 and kv["decode_prefilled_tokens"] <= 1
    assert kv["prefill_pid"] != kv["decode_pid"]
    assert router["named"] == router["served"] is not None
    assert {p["name"] for p in result["phases"]} >= {"prefill-0", "decode-0", "weights-0", "first answer"}


BROKEN_NIXL = f"components.decode.env.PYTHONPATH={ROOT / 'tests/faults/nixl_refuses_peers'}:{ROOT}"
"""NIXL refuses every peer in the decode worker, as it does when no network leads there (UCX finds one on most machines)."""


def test_broken_nixl_still_answers_but_the_smoke_says_so(tmp_path):
    code, result, err = smoke(tmp_path, "disagg", "tiny-full", TINY, "tiny-cpu", BROKEN_NIXL)
    assert result["answer"], err
    assert code != 0
    assert "KV-HANDOVER-RECOMPUTED" in err
    assert result["kv"]["decode_prefilled_tokens"] > 1
