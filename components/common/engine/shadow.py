"""The shadow check beside a worker's engine: samples requests that used cached KV, checks them while nothing else runs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from components.common.kv.build import kv_params_for
from components.common.kv.classes import Classes
from components.common.kv.config import KvTiersConfig
from components.common.kv.journal import JournalWriter
from components.common.kv.keys import PUBLIC, Namespace
from components.common.kv.shadow import Hit, ShadowChecker, Tops, chunk_hashes, quarantine
from components.common.kv.store import KvStore
from components.common.kv.stores import NAMESPACES
from components.common.messages.salt import parse
from components.common.messages.tenants import TenantsFile
from components.common.storage.account import Account

log = logging.getLogger("dynamo_blob.worker")
_ATTEMPTS = 20


class _Engine:
    """What the check needs of vLLM's AsyncLLM."""

    def __init__(self, llm: Any, busy: Callable[[], bool]) -> None:
        self._llm, self._busy, self._n = llm, busy, 0

    async def tops(self, ids: Sequence[int], salt: str, stored: bool) -> tuple[Tops, int]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = (
            {**kv_params_for("aggregated", {}, salt)} if stored else {"tenant": "", "class": "", "kv_load_tiers": []}
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

    async def forget(self) -> None:
        for _ in range(_ATTEMPTS):
            if await self._llm.reset_prefix_cache(reset_connector=True):
                return
            await asyncio.sleep(0.1)
        log.error("KV-QUARANTINE: HBM and DRAM could not be emptied: blocks are in use; restart the worker")


class Shadow:
    """Owned by the worker. `note` after each request; `close` at the end. Off unless `kv.shadow_every` > 0."""

    def __init__(self, llm: Any, config: KvTiersConfig, worker: str, busy: Callable[[], bool]) -> None:
        assert config.account is not None
        self._config, self._stop = config, asyncio.Event()
        block = int(llm.vllm_config.cache_config.block_size)
        self._chunk = block * config.blocks_per_chunk
        self._account = Account(config.account)
        classes = Classes.of_file(TenantsFile.load(config.tenants_file), config.container) if config.tenants_file else Classes.single(config.container)  # fmt: skip
        self._containers = sorted(set(classes.containers().values()))
        self._store = KvStore(self._account, config.container or self._containers[0])
        self._journal = JournalWriter(self._store, f"{worker}-shadow")
        self.checker = ShadowChecker(
            _Engine(llm, busy), self._chunk, lambda ids, salt: chunk_hashes(ids, salt, block, self._chunk),
            self._condemn, every=config.shadow_every, band=config.shadow_band,
        )  # fmt: skip
        self._task = asyncio.create_task(self.checker.run(self._stop))

    def note(self, ids: Sequence[int], salt: str | None, cached: int) -> None:
        """A request is over; `cached` of its prompt tokens came from HBM, DRAM or Blob."""
        if cached >= self._chunk:
            self.checker.note(Hit(tuple(ids), salt or "", cached))

    async def close(self) -> None:
        self._stop.set()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._store.close()
        self._account.close()

    async def _condemn(self, keys: list[bytes], salt: str) -> None:
        found = parse(salt)
        await asyncio.to_thread(self._delete, found.tenant if found else PUBLIC, keys)

    def _delete(self, tenant: str, keys: list[bytes]) -> None:
        """In every namespace of these weights that the store knows: one too many costs a recomputation."""
        notes = [
            self._account.get(self._store.control, b.name) for b in self._account.list(self._store.control, NAMESPACES)
        ]
        spaces = [Namespace.model_validate_json(n) for n in notes]
        import time

        names = quarantine(
            self._store, self._containers, tenant, spaces, keys,
            lambda name, reason: self._journal.add("g", name, reason, f"{time.time():.3f}"),
        )  # fmt: skip
        self._journal.flush()
        log.error("KV-QUARANTINE: %d objects of tenant %s deleted: %s", len(names), tenant, names[0] if names else "")


def open_shadow(llm: Any, settings: dict[str, Any] | None, worker: str, busy: Callable[[], bool]) -> Shadow | None:
    """The check of a worker, or None when it is off or there is no Blob tier."""
    if not settings:
        return None
    config = KvTiersConfig.parse(settings, where="kv")
    return Shadow(llm, config, worker, busy) if config.shadow_every and config.account is not None else None
