"""A worker gives its engine the time that ending in order takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from vllm import envs

from components.common.engine.config import WorkerConfig
from components.common.engine.worker import VllmEngine


async def test_engine_core_may_wait_for_its_worker_and_then_close_the_kv_tiers(tmp_path: Path) -> None:
    config = WorkerConfig.model_construct(name="prefill-0", run_dir=str(tmp_path), drain_s=0)
    engine, given = VllmEngine(config, "", "ab" * 32), []
    engine.llm = SimpleNamespace(shutdown=lambda timeout=5.0: given.append(timeout))
    await engine.cleanup()
    sigterm, tiers = 4, 5 + 2  # vLLM's second wait for its worker; DynamoBlobTier.shutdown
    assert envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS + sigterm + tiers <= given[0]
    aborting, grace = 5, 30  # InFlight.drain; what the plan allows beyond drain_s
    assert aborting + given[0] < grace
