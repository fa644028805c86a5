"""The bed of the faults on a whole graph: the graph, the store of its KV, the proxy between them, and waves of prompts."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import aiohttp

from components.common.kv import explain
from components.common.kv.keys import PUBLIC
from components.common.messages.router import Decide, Decision, Note
from components.common.storage.sas import issue, write_secret
from tests.e2e.graph import Graph
from tests.kvtools import kv
from tests.kvtools.azure import NAME, Store
from tests.kvtools.proxy import FaultProxy, Rule
from tests.kvtools.text import ids

CONTAINER = "kv-faults"
CHUNKS = f"/{CONTAINER}/{PUBLIC}/"
PREFILL = ("prefill-0", "prefill-1")
PROMPTS, CHUNKS_EACH, TOKENS = 14, 5, 8
HBM, DRAM = 16, 10
"""Chunks that a worker holds at most: both workers together fewer than the working set, or a wave may find all of it above Blob."""
ROW = 2 * 2 * 2 * 32 * 4 * 128
"""Bytes of a chunk: layers x (K and V) x heads x head size x 4 bytes x tokens."""
HANG_S = 120.0
"""A request that takes longer hangs; the store's deadlines below add up to less than a tenth of it."""


class Bed:
    """The graph, the store of its KV and the proxy between them."""

    def __init__(self, graph: Graph, store: Store, proxy: FaultProxy, sas: Path) -> None:
        self.graph, self.store, self.proxy, self.sas = graph, store, proxy, sas
        self.prompts = [ids(128 * CHUNKS_EACH + 40 + i, seed=7000 + i) for i in range(PROMPTS)]
        self.cold: list[dict[str, Any]] = []
        self.http: aiohttp.ClientSession
        self.said: dict[str, str] = {}
        self.frontend = 0

    def grant(self, key: str = "") -> None:
        """Write the workers' SAS, signed with the store's key or another one."""
        token = issue(
            f"http://127.0.0.1:{self.proxy.port}/{NAME}", key or self.store.key.read_text().strip(), "kv", ttl_s=3600
        )
        write_secret(self.sas, json.dumps(token))

    async def ask(self, prompt: list[int], salt: str = "") -> dict[str, Any]:
        """As a client; with a composed salt as the gateway, which alone may set one."""
        body = {
            "model": self.graph.model,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 5,
            **({"cache_salt": salt} if salt else {}),
        }
        url = f"http://127.0.0.1:{self.frontend}" if salt else self.graph.url
        began = time.monotonic()
        async with self.http.post(url + "/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=HANG_S)) as r:
            answer = await r.json()
            assert r.status == 200, f"a request was lost: {answer}"
        choice = answer["choices"][0]
        assert len(choice["logprobs"]["tokens"]) == TOKENS, "an answer is cut short"
        details = answer["usage"].get("prompt_tokens_details") or {}
        return {**choice["logprobs"], "cached": details.get("cached_tokens") or 0, "seconds": time.monotonic() - began}

    async def wave(self, seed: int = 0, at_once: int = 3) -> Wave:
        """Every prompt once, in random order, `at_once` at a time."""
        order, gate = random.Random(seed).sample(range(PROMPTS), PROMPTS), asyncio.Semaphore(at_once)

        async def one(i: int) -> dict[str, Any]:
            async with gate:
                return await self.ask(self.prompts[i])

        got = await asyncio.gather(*[one(i) for i in order])
        return Wave({i: g for i, g in zip(order, got, strict=True)}, self.cold)

    def kv(self) -> dict[str, dict[str, Any]]:
        """What `dynamo status` reads of each prefill worker's tier."""
        return {worker: explain.read(path)[0] for worker, path in self.said.items()}

    def ended(self, how: str, worker: str = "") -> int:
        """Chunks whose transfer ended so, over the prefill workers or at one of them."""
        return sum(said["ends"].get(how, 0) for name, said in self.kv().items() if worker in ("", name))

    async def counted(self, name: str) -> float:
        """A counter of vLLM's, over the prefill workers."""
        return sum([(await self.graph.counters(worker)).get(name, 0.0) for worker in PREFILL])

    async def recovered(self, worker: str = "") -> None:
        """Waits until waves hit Blob again (that worker, if named): nobody has to restart anything."""
        end, loads = time.monotonic() + 180, self.ended("load_ok", worker)
        while self.ended("load_ok", worker) <= loads:
            assert time.monotonic() < end, f"no hits again after the fault: {self.kv()}"
            wave = await self.wave()
            assert not wave.wrong, wave.wrong

    async def struck(self, rule: Rule, seed: int) -> None:
        """Waves until the fault has met a request (the breaker that the last one opened closes by itself); no answer is wrong."""
        end = time.monotonic() + 90
        while True:
            wave = await self.wave(seed)
            assert not wave.wrong, (rule, wave.wrong)
            if rule.hits:
                return
            assert time.monotonic() < end, f"the tier does not read again: {self.kv()}"

    async def credited(self, salt: str, prompts: list[list[int]]) -> list[int]:
        """Blocks of each prompt that our router credits a worker with, for a request of this salt."""
        reader, writer = await asyncio.open_unix_connection(self.graph.process("router-0")["sockets"][0])
        found = []
        for n, prompt in enumerate(prompts):
            for message in (Decide(n=n, rid=f"{salt}{n}", ids=prompt, salt=salt), Note(op="done", rid=f"{salt}{n}")):
                writer.write(message.model_dump_json().encode() + b"\n")
            found.append(Decision.model_validate_json(await reader.readline()).overlap_blocks)
        writer.close()
        return found

    def row(self, name: str) -> dict[str, Any]:
        """A process as `dynamo status` shows it."""
        return next(p for p in self.graph.status()["processes"] if p["name"] == name)

    def written(self, worker: str) -> int:
        """When the worker's tier last wrote its status: at steps, so when it served."""
        return Path(self.said[worker]).stat().st_mtime_ns

    def objects(self) -> list[str]:
        return kv.chunks(self.store, CONTAINER)


class Wave:
    def __init__(self, got: dict[int, dict[str, Any]], cold: list[dict[str, Any]]) -> None:
        self.hits = sum(g["cached"] > 0 for g in got.values())
        self.tokens = sum(g["cached"] for g in got.values())
        self.slowest = max(g["seconds"] for g in got.values())
        self.wrong = {i: why for i, g in got.items() if cold and (why := differs(g, cold[i]))}


def differs(got: dict[str, Any], cold: dict[str, Any]) -> str:
    """How an answer differs from the one without tiers; empty = it does not. Batches round differently (1e-6 in fp32), and
    a near tie may then fall the other way: what follows it is another answer of the same model and is not compared."""
    for n, (mine, theirs) in enumerate(zip(got["top_logprobs"], cold["top_logprobs"], strict=True)):
        common = mine.keys() & theirs.keys()
        far = max((abs(mine[t] - theirs[t]) for t in common), default=9.0)
        if far > 1e-3 or len(common) < 3:
            return f"position {n}: logprobs differ by {far:.3g}, {len(common)} of 5 in common"
        if got["tokens"][n] != cold["tokens"][n]:
            return ""
    return ""


def shared_memory(pid: int) -> set[str]:
    """Files of vLLM in /dev/shm that a process has mapped."""
    lines = [line.split(None, 5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    paths = {
        line[5] for line in lines if len(line) == 6 and line[5].startswith(("/dev/shm/vllm_offload", "/dev/shm/psm_"))
    }
    return {path for path in paths if not path.endswith("(deleted)")}
