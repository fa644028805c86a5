"""vLLM behind Dynamo's LLMEngine contract, in the roles prefill, decode and aggregated.

Life: `start` builds the engine (weights stream in through our load_format), warms it up and hands
Dynamo its KV geometry; `generate` serves; `cleanup` waits for answers in flight, then lets the rest
migrate. Prefill answers one token and `disaggregated_params`; decode pulls the KV they describe.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.disagg import enforce_prefill_max_tokens, extract_prefill_result
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.logprobs import extract_from_completion_output
from dynamo.common.backend.metrics import register_global_registry
from dynamo.common.backend.publisher import KvEventSource, ZmqSource
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import Disconnected, EngineShutdown, InvalidArgument

from components.common.engine import choices, handover, tags
from components.common.engine.args import engine_args
from components.common.engine.config import WorkerConfig
from components.common.engine.drain import InFlight
from components.common.engine.sampling import sampling_params
from components.common.errors import DynamoBlobError
from components.common.messages.salt import plain

log = logging.getLogger("dynamo_blob.worker")

WATCH_S = 0.5  # a dead engine is noticed within this time when no request notices it first
ENDING_S = 20.0
"""Seconds EngineCore may take to end. It waits up to 9 s for its own worker and closes the KV tiers only then: with vLLM's default (5 s) it was
killed before, on every graph of a busy machine. Drain, abort (5 s) and this fit into the launcher's grace (drain_s + 30)."""
QUIESCENT_S = 2.0  # a prefill worker's blocks are pulled within this time after the last answer, or recomputed


class VllmEngine(LLMEngine):
    """One vLLM engine. `model_path` is the directory of the release's small files."""

    def __init__(self, config: WorkerConfig, model_path: str, weights_digest: str) -> None:
        self.config, self.model_path, self.weights_digest = config, model_path, weights_digest
        self.llm: Any = None
        self.in_flight = InFlight()
        self._others: dict[str, list[str]] = {}
        self.identity: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self._events = f"ipc://{config.run_dir}/{config.name}.kv"
        self._relay: Any = None
        self._guarded: Any = None
        self._watch: asyncio.Task[None] | None = None
        self.died = ""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """Unused: `components.common.engine.launch` builds engine and Dynamo's WorkerConfig together."""
        raise DynamoBlobError("ENGINE-ENTRY", "start a worker with python -m components.<role> --plan FILE")

    async def start(self, worker_id: int) -> EngineConfig:
        import vllm
        from vllm.v1.engine.async_llm import AsyncLLM

        began = time.monotonic()
        args = engine_args(self.config, self.model_path, self._events)
        self.llm = AsyncLLM.from_engine_args(args)
        built = time.monotonic()
        self.identity = handover.identity(self.config, self.weights_digest, vllm.__version__)
        self.defaults = self.llm.model_config.get_diff_sampling_param()
        if self.config.warmup:
            await self._warm_up()
        self._watch = asyncio.create_task(self._watch_engine())
        if self.config.kv is not None and self.config.kv.settings:
            from components.common.engine.guarded import open_guarded

            self._guarded = await open_guarded(
                self.llm, self.config.kv.settings, self.config.name, self.config.role, lambda: bool(len(self.in_flight))
            )
        cache = self.llm.vllm_config.cache_config
        log.info(
            "%s ready: engine %.1f s, warm-up %.1f s, instance %d, %s KV blocks of %d tokens",
            self.config.name, built - began, time.monotonic() - built, worker_id, cache.num_gpu_blocks, cache.block_size,
        )  # fmt: skip
        return EngineConfig(
            model=self.model_path,
            served_model_name=self.config.served_model,
            llm=LlmRegistration(
                context_length=self.config.engine.max_model_len,
                kv_cache_block_size=cache.block_size,
                total_kv_blocks=cache.num_gpu_blocks,
                max_num_seqs=self.config.engine.max_num_seqs,
                max_num_batched_tokens=self.config.engine.max_num_batched_tokens,
            ),
        )

    async def _watch_engine(self) -> None:
        """A dead EngineCore is not survivable: leave the pool in order, exit non-zero, be restarted."""
        while not self.llm.errored:  # noqa: ASYNC110 - vLLM offers no event
            await asyncio.sleep(WATCH_S)
        self.died = f"{type(self.llm.dead_error).__name__}: {self.llm.dead_error}"
        log.error("ENGINE-DIED: %s: the engine process is gone; the worker leaves", self.config.name)
        os.kill(os.getpid(), signal.SIGTERM)

    async def _warm_up(self) -> None:
        """One short generation: the first use of each kernel costs seconds. Its KV is forgotten again."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=list(range(5, 5 + min(40, self.config.engine.max_model_len // 2))))
        async for _ in self.llm.generate(prompt, SamplingParams(max_tokens=2, detokenize=False), "warm-up"):
            pass
        await self.llm.reset_prefix_cache()

    async def kv_event_sources(self) -> list[KvEventSource]:
        """vLLM's events, by way of the relay that adds each block's salt (Dynamo's router needs it)."""
        from components.common.kv.events import start_relay

        relayed = self._events + ".relay"
        self._relay = start_relay(self._events, relayed)
        return [ZmqSource(endpoint=relayed, dp_rank=0)]

    async def register_prometheus(self, metrics: Any) -> None:
        register_global_registry(metrics, engine_prefix="vllm:")

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_health_check_payload(bos_token_id=1)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        if self.in_flight.draining or self.died:
            raise EngineShutdown("the worker is draining")
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async for chunk in self._generate(request, context):
                yield chunk
        except (VLLMClientError, ValueError) as e:
            raise InvalidArgument(str(e)) from e
        except DynamoBlobError as e:
            raise InvalidArgument(f"{e.code}: {e.why or e.what}") from e
        except EngineDeadError as e:
            raise Disconnected("the engine died") from e  # the frontend runs it elsewhere

    async def _generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        from vllm.inputs import TokensPrompt

        normalize_request_token_ids(request)
        prompt = list(request["token_ids"])
        request_id = context.id()
        salt = (request.get("routing") or {}).get("cache_salt")
        if self.config.role == "prefill":
            enforce_prefill_max_tokens(request)
        room = self.config.engine.max_model_len - len(prompt)
        suffix = self._guarded.suffix(prompt, salt) if self._guarded is not None else ""
        kv, suffix = self._kv_params(request, context, salt, suffix)
        key = (salt or "") + suffix
        params = sampling_params(request, self.defaults, room, {"kv_transfer_params": kv})
        if self.config.role == "prefill":
            params.n = 1  # one prompt is one handover, however many answers decode makes of it
        inputs = TokensPrompt(prompt_token_ids=prompt)
        if key:
            inputs["cache_salt"] = key
        sent = [0] * (params.n or 1)
        output: Any = None
        if len(sent) > 1 and kv.get("do_remote_prefill"):
            self._others[request_id] = choices.others(request_id, len(sent))
            outputs = choices.generate(self.llm, inputs, params, request_id, self._tier_params(context, key, True))
        else:
            outputs = self.llm.generate(inputs, params, request_id)
        ends: list[dict[str, Any]] = []
        with self.in_flight.track(request_id), forgotten(self._others, request_id):
            async for output in outputs:
                for choice in output.outputs:
                    if choice.finish_reason == "abort" and self.in_flight.draining:
                        raise EngineShutdown("the worker is draining")
                    chunk = self._chunk(choice, sent, request, len(prompt), output, suffix)
                    if chunk is not None and len(sent) > 1:
                        chunk = choices.without_end(chunk, ends)
                    if chunk is not None:
                        yield chunk
            for chunk in choices.together(ends):
                yield chunk
        if self._guarded is not None and output is not None:
            self._guarded.note(prompt, key, output.num_cached_tokens or 0)

    def _kv_params(self, request: Any, context: Any, salt: str | None, suffix: str) -> tuple[dict[str, Any], str]:
        """kv_transfer_params for the connectors, the handover's part and the tiers' part; and the suffix of the salt."""
        params: dict[str, Any] = {}
        if self.config.role == "prefill":
            params.update(handover.PREFILL_PARAMS)
        elif self.config.role == "decode":
            try:
                offered = extract_prefill_result(request)
                pulled = handover.accept(offered, self.identity)
                if pulled:
                    suffix = handover.agreed(offered, suffix)
                    params.update(pulled)
            except DynamoBlobError as e:
                log.error("%s", e)
        params.update(self._tier_params(context, (salt or "") + suffix, bool(params.get("do_remote_prefill"))))
        return params, suffix

    def _tier_params(self, context: Any, key: str, remote_kv: bool) -> dict[str, Any]:
        """`key` is the salt as the engine has it; what is under quarantine changes keys, not whose KV it is."""
        if self.config.kv is None:
            return {}
        return tags.tier_params(self.config.role, context.metadata, plain(key) or None, remote_kv)

    def _chunk(
        self, choice: Any, sent: list[int], request: Any, prompt_len: int, output: Any, suffix: str
    ) -> dict[str, Any] | None:
        """Dynamo's chunk for what `choice` gained since the last one; None when it gained nothing."""
        done, index = sent[choice.index], choice.index
        new = list(choice.token_ids[done:])
        if not new and choice.finish_reason is None:
            return None
        chunk: dict[str, Any] = {"token_ids": new, "index": index}
        log_probs, top = extract_from_completion_output(choice, done)
        if log_probs is not None:
            chunk["log_probs"], chunk["top_logprobs"] = log_probs, top
        sent[index] = len(choice.token_ids)
        if choice.finish_reason is not None:
            chunk["finish_reason"] = "cancelled" if choice.finish_reason == "abort" else choice.finish_reason
            chunk["completion_usage"] = _usage(prompt_len, sum(sent), output.num_cached_tokens, request)
            if self.config.role == "prefill":
                chunk["disaggregated_params"] = handover.offer(output.kv_transfer_params, self.identity, suffix)
        return chunk

    async def abort(self, context: Any) -> None:
        if self.llm is not None:
            await self._abort(context.id())

    async def _abort(self, request_id: str) -> None:
        for name in (request_id, *self._others.get(request_id, ())):
            await self.llm.abort(name)

    async def is_quiescent(self) -> bool | None:
        return len(self.in_flight) == 0 and time.monotonic() - self.in_flight.last_end > QUIESCENT_S

    async def cleanup(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self.llm is None:
            return
        aborted = await self.in_flight.drain(self.config.drain_s, self._abort)
        if aborted:
            log.warning(
                "%s: %d answers did not finish in %.0f s and migrate", self.config.name, aborted, self.config.drain_s
            )
        if self._guarded is not None:
            await self._guarded.close()
        self.llm.shutdown(timeout=ENDING_S)
        self.llm = None
        if self._relay is not None:
            self._relay.stop()
            self._relay = None


@contextmanager
def forgotten(names: dict[str, Any], key: str) -> Iterator[None]:
    """Take `key` out of `names` at the end."""
    try:
        yield
    finally:
        names.pop(key, None)


def _usage(prompt: int, completion: int, cached: int | None, request: dict[str, Any]) -> dict[str, Any]:
    """OpenAI usage. Decode reports the prefill worker's cached tokens: the client sees one request."""
    from_prefill = ((request.get("prefill_result") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached or 0 if from_prefill is None else from_prefill},
    }
