"""Start a worker process: ``python -m components.prefill --plan FILE`` (components.decode also runs aggregated).

Exit codes: 0 drained after SIGTERM; 1 refused or failed to start (one coded error on stderr).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from components.common.engine.config import WorkerConfig
from components.common.errors import DynamoBlobError


def main(role: str, argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m components.{role}")
    parser.add_argument("--plan", required=True, help="JSON file with this worker's configuration")
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("azure").setLevel(logging.WARNING)  # it logs every request and its headers at INFO
    config: WorkerConfig | None = None
    try:
        config = WorkerConfig.read(args.plan)
        if (config.role == "prefill") != (role == "prefill"):
            raise DynamoBlobError(
                "ENGINE-ROLE", f"components.{role} was given a plan for the role {config.role}", where=args.plan,
                do="prefill plans go to components.prefill, decode and aggregated ones to components.decode",
            )  # fmt: skip
        _serve(config)
        return 0
    except DynamoBlobError as e:
        error = e
    except Exception as e:
        error = _cause(config, e)
    print(error, file=sys.stderr, flush=True)
    return 1


def _serve(config: WorkerConfig) -> None:
    from components.common.engine.args import check_extra
    from components.common.loading.whole import check_loader

    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    check_loader(config.weights)  # `dynamo check` refuses these too; a worker does not rely on it
    check_extra(config)
    if config.engine_kind == "vllm":
        from components.common.engine import zygote

        if zygote.wanted():
            zygote.preload_openmp()
            zygote.prepare()  # imports vLLM once, before any thread or runtime exists
    import uvloop
    from dynamo.common.backend.worker import Worker

    async def run() -> None:
        from components.common.messages.announce import Heard

        engine, worker_config = await build(config)
        heard = Heard(config.announce, config.name)
        try:
            await Worker(engine, worker_config).run()
        finally:
            await asyncio.to_thread(heard.close)
        if getattr(engine, "died", ""):
            raise DynamoBlobError(
                "ENGINE-DIED",
                f"{config.name}'s engine process ended",
                why=engine.died,
                do="the engine's own lines above say why",
            )

    uvloop.run(run())


async def build(config: WorkerConfig) -> tuple[Any, Any]:
    """The engine and Dynamo's description of it. Fetches the model directory first (for our loader: config, tokenizer, template)."""
    from dynamo.common.backend import WorkerConfig as DynamoWorkerConfig
    from dynamo.common.constants import DisaggregationMode

    from components.common.loading.files import materialise_small_files
    from components.common.loading.whole import model_directory

    make = materialise_small_files if config.engine_kind == "mock" else model_directory
    path = await asyncio.to_thread(make, config.weights)
    digest = path.name
    if config.engine_kind == "mock":
        from components.common.engine.mock import MockEngine

        engine: Any = MockEngine(config, str(path))
    else:
        from components.common.engine.remote_code import check_remote_code
        from components.common.engine.worker import VllmEngine

        check_remote_code(config, path)
        engine = VllmEngine(config, str(path), digest)
    mode = {"prefill": "PREFILL", "decode": "DECODE", "aggregated": "AGGREGATED"}[config.role]
    return engine, DynamoWorkerConfig(
        namespace=config.namespace,
        component=config.component,
        endpoint="generate",
        model_name=str(path),
        served_model_name=config.served_model,
        endpoint_types="chat,completions",
        discovery_backend=config.discovery,
        request_plane=config.request_plane,
        event_plane=config.event_plane,
        disaggregation_mode=DisaggregationMode[mode],
        enable_kv_routing=True,
    )


def _cause(config: WorkerConfig | None, error: Exception) -> DynamoBlobError:
    """vLLM tells its parent only "Engine core initialization failed"; the loader leaves the real error in its report."""
    report = Path(config.weights.report) if config and config.weights.report else None
    if report and report.exists():
        found = json.loads(report.read_text()).get("error")
        if found:
            known = {k: found.pop(k, "") for k in ("code", "what", "where", "why", "do")}
            code, what = known.pop("code"), known.pop("what")
            return DynamoBlobError(code, what, **known, **found)
    if os.environ.get("DYNAMO_BLOB_TRACEBACK"):
        logging.exception("the worker failed", exc_info=error)
    name = config.name if config else "worker"
    return DynamoBlobError(
        "ENGINE-START-FAILED", f"{name} did not start", why=f"{type(error).__name__}: {error}",
        do="the engine's own lines above say more",
    )  # fmt: skip
