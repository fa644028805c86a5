"""P2: one flipped bit in the last range of the last weight object, on a real vLLM engine: never ready."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.standin import StandIn
from components.common.engine.config import EngineArgs, WorkerConfig
from components.common.registry.manifest import Manifest
from tests.faults.releases import make_release, weights_config
from tests.faults.services import REPOSITORY, ServiceProcess
from tools.tiny_model import build

MODELS = REPOSITORY / ".state" / "models"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build("full", MODELS / "tiny-full", MODELS / "smollm2-135m-instruct")
    target = tmp_path_factory.mktemp("model") / "tiny-full"
    shutil.copytree(MODELS / "tiny-full", target)
    return target


def worker(
    tmp_path: Path, store: StandIn, manifest: Manifest, **weights: Any
) -> tuple[subprocess.Popen[str], WorkerConfig]:
    """A real worker (aggregated, tiny model) as `dynamo serve` starts it."""
    run = tmp_path / "run"
    config = WorkerConfig(
        name="aggregated-0", role="aggregated", served_model="tiny", namespace="p2", component="backend", discovery="file",
        run_dir=str(run), nixl_port=21399, weights=weights_config(store.url, tmp_path / "w", manifest, **weights),
        engine=EngineArgs(max_model_len=512, max_num_seqs=2, kv_cache_bytes=64 << 20),
    )  # fmt: skip
    plan = tmp_path / "worker.json"
    plan.write_text(config.model_dump_json())
    environment = {
        **{k: os.environ[k] for k in ("PATH", "HOME") if k in os.environ}, "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(run / "discovery"),
        "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_SYSTEM_HOST": "127.0.0.1", "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "components.decode", "--plan", str(plan)], cwd=REPOSITORY, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    return process, config


@pytest.mark.slow
def test_flipped_bit_in_the_last_range_of_the_last_object_never_becomes_ready(tmp_path: Path, model: Path) -> None:
    manifest = make_release(tmp_path / "store", model, model="tiny")
    last = [f for f in manifest.files if f.path.endswith(".safetensors")][-1]
    stored = tmp_path / "store/weights" / last.blob
    data = bytearray(stored.read_bytes())
    data[-1] ^= 0x10
    stored.unlink()
    stored.write_bytes(data)
    store = StandIn(tmp_path / "store").start()
    try:
        weights = weights_config(store.url, tmp_path / "w", manifest)
        with ServiceProcess(tmp_path / "s", weights, cache_dir=str(tmp_path / "cache"), cache_bytes=1 << 30) as service:
            process, config = worker(tmp_path, store, manifest, service=service.socket)
            output, _ = process.communicate(timeout=280)
    finally:
        store.close()
    assert process.returncode == 1, output[-3000:]
    said = output[output.rindex("WEIGHTS-DIGEST-MISMATCH") :]
    report = json.loads(Path(config.weights.report).read_text())
    error = report["error"]
    assert error["code"] == "WEIGHTS-DIGEST-MISMATCH" and not report["complete"]
    assert (error["file"], error["range"], error["expected"]) == (last.path, len(last.ranges) - 1, last.ranges[-1])
    assert error["found"] != error["expected"] and len(error["found"]) == 64
    for part in (last.path, f"range {len(last.ranges) - 1}", error["expected"], error["found"]):
        assert part in said
    last_tensor = manifest.tensors[-1].name
    assert report["tensors"] < len(manifest.tensors)
    assert report.get("last_tensor") != last_tensor
    assert not list(Path(config.run_dir).rglob("*v1/mdc*")), "no model was registered with Dynamo"
    assert not [p for p in (tmp_path / "cache/objects").iterdir() if p.name == last.blake3], (
        "the cache keeps no wrong file"
    )
