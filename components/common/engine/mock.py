"""A fake engine behind Dynamo's LLMEngine contract: no model, but a real protocol.

It keeps a prefix cache of bounded size (LRU), publishes KV events for what it stores and evicts, honours the
prefill/decode contract, cancellation and drain. For volume and fault tests, and for `graphs/mock.yaml`.
It never calls itself real: its model card and its metrics say ``engine=mock``.

What it answers is known in advance, so a test can tell a whole answer from a torn one: token `i` of an answer is
``word(position)``, position = prompt tokens + i. A request that migrates (prompt grown by what was already
answered) goes on with the right word.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend import WorkerConfig as DynamoWorkerConfig
from dynamo.common.backend.disagg import enforce_prefill_max_tokens, extract_prefill_result
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.publisher import KvEventSource, PushSource
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from components.common.engine.choices import together, without_end
from components.common.engine.config import WorkerConfig
from components.common.errors import DynamoBlobError
from components.common.messages.loadplan import LoadPlan
from components.common.messages.loadplan import read as read_load_plan

WORDS = 1000
"""Distinct answer words; positions wrap around."""

DEFAULT_ANSWER = 32
"""Tokens after which it stops on its own when the request sets no limit."""

BYTES_PER_TOKEN = 1024
"""What the fake cache charges for a token: `kv_cache_bytes` / this = its capacity in tokens."""

MODES = {
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
    "aggregated": DisaggregationMode.AGGREGATED,
}


def words(tokenizer_json: Path) -> list[int]:
    """Token ids of the first `WORDS` plain lower-case words of a vocabulary: each decodes to " word" on its own."""
    try:
        vocab: dict[str, int] = json.loads(tokenizer_json.read_text())["model"]["vocab"]
    except (OSError, ValueError, KeyError) as e:
        raise DynamoBlobError(
            "MOCK-NO-TOKENIZER", "the mock engine needs a tokenizer to answer in words", where=str(tokenizer_json),
            why=str(e), do="point the worker at a model directory with tokenizer.json",
        ) from None  # fmt: skip
    ids = sorted(
        i
        for t, i in vocab.items()
        if t[:1] == "Ġ" and len(t) > 3 and t[1:].isascii() and t[1:].islower() and t[1:].isalpha()
    )
    if len(ids) < WORDS:
        raise DynamoBlobError(
            "MOCK-NO-TOKENIZER",
            f"only {len(ids)} plain words in the vocabulary",
            where=str(tokenizer_json),
            do="use a BPE tokenizer",
        )
    return ids[:WORDS]


def answer_ids(word_ids: Sequence[int], prompt_tokens: int, n: int) -> list[int]:
    """The `n` tokens the mock answers to a prompt of `prompt_tokens` tokens."""
    return [word_ids[(prompt_tokens + i) % len(word_ids)] for i in range(n)]


class PrefixCache:
    """Blocks by chained hash, least recently used first out. Not thread safe: one event loop owns it."""

    def __init__(self, block_size: int, capacity_blocks: int) -> None:
        self.block_size, self.capacity = block_size, capacity_blocks
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def hashes(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Signed 64-bit hash of every full block; each covers all tokens before it and the salt."""
        out, h = [], salt.encode()
        for i in range(len(tokens) // self.block_size):
            block = tokens[i * self.block_size : (i + 1) * self.block_size]
            h = hashlib.blake2b(h + b"".join(t.to_bytes(4, "little") for t in block), digest_size=16).digest()
            out.append(int.from_bytes(h[:8], "little", signed=True))
        return out

    def hit(self, hashes: Sequence[int]) -> int:
        """Leading blocks that are present; touches them."""
        n = 0
        for h in hashes:
            if h not in self.blocks:
                break
            self.blocks.move_to_end(h)
            n += 1
        return n

    def put(self, hashes: Sequence[int]) -> tuple[int, list[int]]:
        """Store blocks beyond the leading hit. Returns (index of the first new block, evicted hashes)."""
        first = self.hit(hashes)
        for h in hashes[first:]:
            self.blocks[h] = None
            self.blocks.move_to_end(h)
        evicted = []
        while len(self.blocks) > self.capacity:
            evicted.append(self.blocks.popitem(last=False)[0])
        return first, evicted


class MockEngine(LLMEngine):
    """See the module's docstring. `model_path` is a directory with tokenizer.json (no weights needed)."""

    def __init__(self, config: WorkerConfig, model_path: str = "") -> None:
        self.config, self.model_path = config, model_path or _find_tokenizer(Path(config.weights.root))
        self.mode = MODES[config.role]
        self.block_size = config.engine.block_size
        capacity = max(1, config.engine.kv_cache_bytes // (self.block_size * BYTES_PER_TOKEN))
        self.cache = PrefixCache(self.block_size, capacity)
        self.words: list[int] = []
        self.publisher: Any = None
        self.worker_id = 0
        self.inflight = 0
        self.closing = False
        self.last_plan = LoadPlan()
        self.counters: dict[str, int] = dict.fromkeys(
            (
                "requests",
                "prompt_tokens",
                "cached_tokens",
                "prefilled_tokens",
                "answer_tokens",
                "cancelled",
                "handovers",
                "migrated_away",
                "load_plans",
            ),
            0,
        )
        self._prefill_lock = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[MockEngine, DynamoWorkerConfig]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--plan", required=True, help="JSON of a WorkerConfig")
        parser.add_argument(
            "--model-path", default="", help="directory with tokenizer.json; default: below weights.root"
        )
        args = parser.parse_args(argv)
        engine = cls(WorkerConfig.read(args.plan), args.model_path)
        return engine, engine.dynamo_config()

    def dynamo_config(self) -> DynamoWorkerConfig:
        c = self.config
        return DynamoWorkerConfig(
            namespace=c.namespace, component=c.component, endpoint="generate", model_name=self.model_path,
            served_model_name=c.served_model, endpoint_types="chat,completions", discovery_backend=c.discovery,
            request_plane=c.request_plane, event_plane=c.event_plane, disaggregation_mode=self.mode,
            enable_kv_routing=True, metrics_labels=[("engine", "mock")],
        )  # fmt: skip

    # -- lifecycle

    async def start(self, worker_id: int) -> EngineConfig:
        self.worker_id = worker_id
        self.words = words(Path(self.model_path) / "tokenizer.json")
        e = self.config.engine
        return EngineConfig(
            model=self.model_path,
            served_model_name=self.config.served_model,
            runtime_data={"engine": "mock", "name": self.config.name, "pid": os.getpid()},
            llm=LlmRegistration(
                context_length=e.max_model_len, kv_cache_block_size=self.block_size, total_kv_blocks=self.cache.capacity,
                max_num_seqs=e.max_num_seqs, max_num_batched_tokens=e.max_num_batched_tokens,
            ),
        )  # fmt: skip

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [PushSource(on_ready=self._attach, dp_rank=0)]

    def _attach(self, publisher: Any) -> None:
        self.publisher = publisher

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_health_check_payload(bos_token_id=1)

    async def register_prometheus(self, metrics: Any) -> None:
        metrics.register_prometheus_expfmt_callback(self.exposition)

    def exposition(self) -> str:
        """Prometheus text of the counters; `dynamo_blob_engine_info` says that nothing here is real."""
        lines = [
            "# TYPE dynamo_blob_engine_info gauge",
            f'dynamo_blob_engine_info{{kind="mock",role="{self.config.role}"}} 1',
        ]
        for name, value in self.counters.items():
            lines += [f"# TYPE dynamo_blob_mock_{name}_total counter", f"dynamo_blob_mock_{name}_total {value}"]
        lines += ["# TYPE dynamo_blob_mock_inflight gauge", f"dynamo_blob_mock_inflight {self.inflight}"]
        lines += [
            "# TYPE dynamo_blob_mock_cached_blocks gauge",
            f"dynamo_blob_mock_cached_blocks {len(self.cache.blocks)}",
        ]
        lines += ["# TYPE dynamo_blob_mock_load_plan_tokens gauge"]
        lines += [f"dynamo_blob_mock_load_plan_tokens {self.last_plan.max_load_tokens or 0}"]
        return "\n".join(lines) + "\n"

    async def is_quiescent(self) -> bool | None:
        return self.inflight == 0

    async def cleanup(self) -> None:
        """Answers in flight may finish for `drain_s`; then `EngineShutdown` makes the frontend migrate them."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.config.drain_s)
        self.closing = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), 5.0)

    # -- requests

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        self.inflight += 1
        self._idle.clear()
        ended = False
        try:
            async for chunk in self._generate(request, context):
                ended = ended or bool(chunk.get("finish_reason"))
                yield chunk
        except (GeneratorExit, asyncio.CancelledError):  # dropped before it could see that its context is stopped
            self.counters["cancelled"] += not ended
            raise
        finally:
            self.inflight -= 1
            if not self.inflight:
                self._idle.set()

    async def _generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        normalize_request_token_ids(request)
        tokens: list[int] = list(request["token_ids"])
        if is_probe(request):
            yield {"token_ids": [self.words[0]], "index": 0, "finish_reason": "stop"}
            return
        if self.mode == DisaggregationMode.PREFILL:
            enforce_prefill_max_tokens(request)
        if len(tokens) >= self.config.engine.max_model_len:
            raise InvalidArgument(
                f"the prompt has {len(tokens)} tokens; this engine takes {self.config.engine.max_model_len} with the answer"
            )
        self.counters["requests"] += 1
        plan = read_load_plan(context.metadata)
        if plan != LoadPlan():
            self.counters["load_plans"] += 1
            self.last_plan = plan
        handed = extract_prefill_result(request) if self.mode == DisaggregationMode.DECODE else None
        salt = (request.get("routing") or {}).get("cache_salt") or ""
        cached = await self._prefill(tokens, salt, handed)
        stop = request.get("stop_conditions") or {}
        room = self.config.engine.max_model_len - len(tokens)
        most = min(stop.get("max_tokens") or DEFAULT_ANSWER, room)
        choices = max(1, (request.get("sampling_options") or {}).get("n") or 1)
        if self.mode == DisaggregationMode.PREFILL:
            choices = 1  # one prompt is one handover, however many answers decode makes of it
        logprobs = (request.get("output_options") or {}).get("logprobs")
        ends: list[dict[str, Any]] = []
        for i, token in enumerate(answer_ids(self.words, len(tokens), most)):
            if context.is_stopped():
                self.counters["cancelled"] += 1
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                return
            if self.closing:
                self.counters["migrated_away"] += 1
                raise EngineShutdown("the worker is going away")
            if self.mode != DisaggregationMode.PREFILL:
                await asyncio.sleep(self.config.mock_token_ms / 1e3)
            self.counters["answer_tokens"] += choices
            for index in range(choices):
                chunk: dict[str, Any] = {"token_ids": [token], "index": index}
                if logprobs is not None:
                    chunk |= _logprobs(token, int(logprobs), self.words)
                if i == most - 1:
                    chunk["finish_reason"] = "length" if stop.get("max_tokens") or most == room else "stop"
                    chunk["completion_usage"] = {
                        "prompt_tokens": len(tokens), "completion_tokens": most * choices, "total_tokens": len(tokens) + most * choices,
                        "prompt_tokens_details": {"cached_tokens": cached},
                    }  # fmt: skip
                    if self.mode == DisaggregationMode.PREFILL:
                        chunk["disaggregated_params"] = {
                            "kv_transfer_params": {
                                "engine": "mock",
                                "worker": self.worker_id,
                                "prompt": _fingerprint(tokens),
                            }
                        }
                left = without_end(chunk, ends) if choices > 1 else chunk
                if left is not None:
                    yield left
        for end in together(ends):
            yield end

    async def _prefill(self, tokens: list[int], salt: str, handed: dict[str, Any] | None) -> int:
        """Fill the cache; returns cached tokens. A prompt that a prefill worker handed over costs no time here."""
        hashes = self.cache.hashes(tokens, salt)
        if handed is not None:
            params = ((handed.get("disaggregated_params") or {}).get("kv_transfer_params")) or {}
            if params.get("prompt") != _fingerprint(tokens):
                raise DynamoBlobError(
                    "MOCK-HANDOVER-MISMATCH", "the prefill result belongs to another prompt", where=self.config.name
                )
            self.counters["handovers"] += 1
            self._store(tokens, hashes, salt)
            return int((handed.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        cached = min(self.cache.hit(hashes) * self.block_size, len(tokens) - 1)
        if self.config.mock_prefill_tokens_per_s:
            async with self._prefill_lock:  # one prompt at a time, as a saturated engine
                await asyncio.sleep((len(tokens) - cached) / self.config.mock_prefill_tokens_per_s)
        self.counters["prompt_tokens"] += len(tokens)
        self.counters["cached_tokens"] += cached
        self.counters["prefilled_tokens"] += len(tokens) - cached
        self._store(tokens, hashes, salt)
        return cached

    def _store(self, tokens: list[int], hashes: list[int], salt: str) -> None:
        first, evicted = self.cache.put(hashes)
        if self.publisher is None:
            return
        if hashes[first:]:
            bs = self.block_size
            self.publisher.publish_stored(
                token_ids=tokens[first * bs : len(hashes) * bs], num_block_tokens=[bs] * (len(hashes) - first), block_hashes=hashes[first:],
                parent_hash=hashes[first - 1] if first else None, cache_salt=salt or None,
            )  # fmt: skip
        if evicted:
            self.publisher.publish_removed(evicted)


def _logprobs(token: int, top: int, word_ids: Sequence[int]) -> dict[str, Any]:
    others = [w for w in word_ids[: max(0, top)] if w != token][: max(0, top - 1)]
    best = [{"rank": r, "token_id": t, "logprob": -0.1 * r} for r, t in enumerate([token, *others], 1)][:top]
    return {"log_probs": [-0.1], "top_logprobs": [best]}


def _fingerprint(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(b"".join(t.to_bytes(4, "little") for t in tokens), digest_size=8).hexdigest()


def _find_tokenizer(root: Path) -> str:
    for path in (root, *sorted(p for p in root.glob("*") if p.is_dir())):
        if (path / "tokenizer.json").exists():
            return str(path)
    raise DynamoBlobError(
        "MOCK-NO-TOKENIZER",
        "no tokenizer.json for the mock engine",
        where=str(root),
        do="run tools/tiny_model.py or publish the sample model first",
    )


if __name__ == "__main__":
    from dynamo.common.backend.run import run

    run(MockEngine)
