"""A process that runs vLLM engines for tests: imports vLLM once, forks the rest, talks JSON lines.

Started by `tests.kvtools.engines`. Requests {n, do, ...} on stdin, answers {n, ok|error} on stdout; they run concurrently.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from typing import Any

ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
ENDING_S = 20.0
"""As a worker gives its engine; vLLM's own 5 s kill one that has transfers under way."""


class Driver:
    def __init__(self) -> None:
        self.engines: dict[str, Any] = {}
        self.running: dict[str, asyncio.Task[Any]] = {}

    async def start(self, name: str, args: dict[str, Any], env: dict[str, str] | None = None) -> dict[str, Any]:
        from vllm.config import KVEventsConfig, KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        os.environ.update(env or {})
        full: dict[str, Any] = {
            "max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True, "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256_cbor", "disable_log_stats": False, "seed": 0,
            "kv_cache_memory_bytes": 256 << 20, **args,
        }  # fmt: skip
        if "kv_transfer_config" in full:
            full["kv_transfer_config"] = KVTransferConfig(**full["kv_transfer_config"])
        if "kv_events_config" in full:
            full["kv_events_config"] = KVEventsConfig(**full["kv_events_config"])
        began = time.monotonic()
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**full))
        self.engines[name] = llm
        config = llm.vllm_config
        return {
            "seconds": time.monotonic() - began, "engine_id": config.kv_transfer_config.engine_id if config.kv_transfer_config else "",
            "blocks": config.cache_config.num_gpu_blocks, "block_size": config.cache_config.block_size,
        }  # fmt: skip

    async def generate(
        self, name: str, ids: list[int], max_tokens: int = 16, salt: str = "", kv: dict[str, Any] | None = None,
        logprobs: int | None = 5, request: str = "", abort_after: float | None = None, extra: dict[str, Any] | None = None,
        trace: dict[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, detokenize=False,
            extra_args={"kv_transfer_params": kv} if kv is not None else None, **(extra or {}),
        )  # fmt: skip
        prompt = TokensPrompt(prompt_token_ids=ids)
        if salt:
            prompt["cache_salt"] = salt
        rid = request or f"r{time.monotonic_ns()}"
        began, first, last, out = time.monotonic(), None, 0.0, None
        llm = self.engines[name]
        killer = asyncio.create_task(self._abort(llm, rid, abort_after)) if abort_after is not None else None
        async for out in llm.generate(prompt, params, rid, trace_headers=trace):
            last = time.monotonic() - began
            if first is None and out.outputs[0].token_ids:
                first = last
        if killer is not None:
            killer.cancel()
        choice = out.outputs[0]
        tops = [sorted((int(t), float(p.logprob)) for t, p in position.items()) for position in choice.logprobs or []]
        return {
            "tokens": list(choice.token_ids), "logprobs": tops, "cached": out.num_cached_tokens, "ttft": first, "seconds": last,
            "kv": out.kv_transfer_params, "finish": choice.finish_reason,
        }  # fmt: skip

    async def _abort(self, llm: Any, rid: str, after: float) -> None:
        await asyncio.sleep(after)
        await llm.abort(rid)

    async def reset(self, name: str, dram: bool = False) -> bool:
        """Forget HBM (and DRAM); retried while transfers hold blocks."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if await self.engines[name].reset_prefix_cache(reset_connector=dram):
                return True
            await asyncio.sleep(0.02)
        return False

    async def metrics(self, prefix: str = "vllm:") -> dict[str, float]:
        import prometheus_client

        out: dict[str, float] = {}
        for family in prometheus_client.REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith(prefix) and not sample.name.endswith("_created"):
                    labels = ",".join(
                        f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("engine", "model_name")
                    )
                    key = f"{sample.name}{{{labels}}}"
                    out[key] = out.get(key, 0.0) + sample.value
        return out

    async def rpc(self, name: str, method: str) -> Any:
        """What the engine's (first) worker answers to a method of its `worker_extension_cls`."""
        return (await self.engines[name].collective_rpc(method))[0]

    async def pids(self) -> dict[str, int]:
        """Descendants of this process by command name."""
        import psutil

        return {f"{p.name()}:{p.pid}": p.pid for p in psutil.Process().children(recursive=True)}

    async def stop(self, name: str) -> None:
        llm = self.engines.pop(name)
        await asyncio.to_thread(llm.shutdown, ENDING_S)
        import prometheus_client

        for collector in list(prometheus_client.REGISTRY._collector_to_names):
            if any(n.startswith("vllm:") for n in prometheus_client.REGISTRY._collector_to_names.get(collector, ())):
                prometheus_client.REGISTRY.unregister(collector)


async def main(answers: int) -> None:
    driver, loop = Driver(), asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def serve(ask: dict[str, Any]) -> None:
        n, do = ask.pop("n"), ask.pop("do")
        try:
            answer: dict[str, Any] = {"n": n, "ok": await getattr(driver, do)(**ask)}
        except BaseException as e:
            traceback.print_exc()
            answer = {"n": n, "error": f"{type(e).__name__}: {e}"}
        os.write(answers, json.dumps(answer).encode() + b"\n")

    tasks = set()
    while line := await reader.readline():
        task = asyncio.create_task(serve(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    pipe = os.dup(1)
    os.dup2(2, 1)  # engines print; the protocol has its own descriptor
    for key, value in ENGINE_ENV.items():
        os.environ.setdefault(key, value)
    from components.common.engine import zygote

    zygote.prepare()
    os.write(pipe, b'{"n": 0, "ok": "ready"}\n')
    asyncio.run(main(pipe))
    os._exit(0)
