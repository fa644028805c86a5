"""The shadow check beside a worker's engine: samples requests that used cached KV, checks them while nothing else runs."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.kv.build import kv_params_for
from components.common.kv.chain import block_hashes, chunk_hashes
from components.common.kv.classes import home_of
from components.common.kv.config import KvTiersConfig
from components.common.kv.containers import known
from components.common.kv.journal import JournalWriter
from components.common.kv.quarantine import Mark, Quarantine, condemn, owner
from components.common.kv.shadow import Condemned, Hit, ShadowChecker, Tops, known_namespaces, quarantine
from components.common.kv.store import KvStore
from components.common.messages.salt import plain
from components.common.storage.account import Account

log = logging.getLogger("dynamo_blob.worker")
_RETRY_S, _RETRY_MOST_S = 0.5, 30.0


class _Engine:
    """What the check needs of vLLM's AsyncLLM."""

    def __init__(self, llm: Any, busy: Callable[[], bool]) -> None:
        self._llm, self._busy, self._n = llm, busy, 0

    async def tops(self, ids: Sequence[int], salt: str, stored: bool) -> tuple[Tops, int]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = (
            {**kv_params_for("aggregated", {}, plain(salt))}
            if stored
            else {"tenant": "", "class": "", "kv_load_tiers": []}
        )
        sampling = SamplingParams(
            temperature=0, max_tokens=1, logprobs=5, detokenize=False, extra_args={"kv_transfer_params": params}
        )
        prompt = TokensPrompt(prompt_token_ids=list(ids))
        if salt:
            prompt["cache_salt"] = salt
        self._n += 1
        out: Any = None
        async for out in self._llm.generate(  # noqa: B007 - the last one is wanted
            prompt, sampling, f"shadow-{os.getpid()}-{self._n}"
        ):
            pass
        first = out.outputs[0].logprobs[0]
        return {int(t): float(p.logprob) for t, p in first.items()}, int(out.num_cached_tokens or 0)

    def idle(self) -> bool:
        return not self._busy()


class Shadow:
    """Owned by the worker. `note` after each request; `close` at the end. Off unless `kv.shadow_every` > 0."""

    def __init__(
        self, llm: Any, config: KvTiersConfig, worker: str, busy: Callable[[], bool], quarantine: Quarantine
    ) -> None:
        assert config.account is not None
        self._quarantine, self._stop = quarantine, asyncio.Event()
        self._block = int(llm.vllm_config.cache_config.block_size)
        self._chunk = self._block * config.blocks_per_chunk
        self._account = Account(config.account)
        self._store = KvStore(self._account, home_of(config))
        self._journal = JournalWriter(self._store, f"{worker}-shadow")
        self.checker = ShadowChecker(
            _Engine(llm, busy), self._chunk, lambda ids, salt: chunk_hashes(ids, salt, self._block, self._chunk),
            self._condemn, every=config.shadow_every, band=config.shadow_band,
        )  # fmt: skip
        self._task = asyncio.create_task(self.checker.run(self._stop))

    def note(self, ids: Sequence[int], salt: str, cached: int) -> None:
        """A request is over; `cached` of its prompt tokens came from HBM, DRAM or Blob under `salt` (as the engine had it)."""
        if cached >= self._chunk:
            self.checker.note(Hit(tuple(ids), salt, cached))

    async def close(self) -> None:
        self._stop.set()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._store.close()
        self._account.close()

    async def _condemn(self, found: Condemned) -> None:
        """Here at once, then for everybody, then out of Blob. Until the others can know nothing else is checked."""
        tenant, at = owner(found.hit.salt), found.first * self._chunk
        last = list(block_hashes(found.hit.ids[: at + self._block], found.hit.salt, self._block))[-1]
        mark = Mark(at // self._block, last.hex())
        self._quarantine.add(tenant, mark)
        wait_s = _RETRY_S
        while True:
            try:
                await asyncio.to_thread(condemn, self._store, tenant, mark)
                await asyncio.to_thread(self._delete, tenant, found.keys)
                return
            except DynamoBlobError as e:
                log.error("KV-QUARANTINE: the others do not know yet of %s, or it is not deleted: %s", mark.block, e)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RETRY_MOST_S)

    def _delete(self, tenant: str, keys: list[bytes]) -> None:
        """In every namespace that the store knows: one too many costs a recomputation."""
        names = quarantine(
            self._store, known(self._store), tenant, known_namespaces(self._store), keys,
            lambda name, reason: self._journal.add("g", name, reason, f"{time.time():.3f}"),
        )  # fmt: skip
        self._journal.flush()
        log.error("KV-QUARANTINE: %d objects of tenant %s deleted: %s", len(names), tenant, names[0] if names else "")
