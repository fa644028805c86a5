"""P3 and P7 on a whole graph (prefill and decode apart, gateway, router, launcher) while the store of its KV does everything
a store can do: no wrong token, no hang, no lost request.

One start for all phases. HBM and DRAM of the prefill worker are smaller than the working set, so that a wave of all prompts
finds its prefixes in Blob or nowhere. Fp32: every answer equals the one computed when no tier held anything.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from components.common.kv.keys import PUBLIC
from components.common.storage.sas import issue, write_secret
from graphs.site import EMBEDDED_ACCOUNTS
from tests.e2e.graph import TINY, Graph, served
from tests.kvtools import kv
from tests.kvtools.azure import NAME, Store, azurite, free_port
from tests.kvtools.proxy import FaultProxy, Rule
from tests.kvtools.text import ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONTAINER = "kv-faults"
CHUNKS = f"/{CONTAINER}/{PUBLIC}/"
PREFILL = ("prefill-0", "prefill-1")
PROMPTS, CHUNKS_EACH, TOKENS = 14, 5, 8
HBM, DRAM = 24, 12
"""Chunks that a worker holds at most."""
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

    def grant(self, key: str = "") -> None:
        """Write the workers' SAS, signed with the store's key or another one."""
        token = issue(
            f"http://127.0.0.1:{self.proxy.port}/{NAME}", key or self.store.key.read_text().strip(), "kv", ttl_s=3600
        )
        write_secret(self.sas, json.dumps(token))

    async def ask(self, prompt: list[int]) -> dict[str, Any]:
        body = {
            "model": self.graph.model,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 5,
        }
        began = time.monotonic()
        async with self.http.post(
            self.graph.url + "/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=HANG_S)
        ) as r:
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
        """What `dynamo status` says of each worker's tier."""
        return {worker: said[0] for worker, said in self.graph.status()["kv"].items()}

    def ended(self, how: str) -> int:
        """Chunks whose transfer ended so, over the prefill workers."""
        return sum(self.kv()[worker]["ends"].get(how, 0) for worker in PREFILL)

    async def counted(self, name: str) -> float:
        """A counter of vLLM's, over the prefill workers."""
        return sum([(await self.graph.counters(worker)).get(name, 0.0) for worker in PREFILL])

    async def recovered(self) -> None:
        """Waits until waves hit Blob again: nobody has to restart anything."""
        end, loads = time.monotonic() + 90, self.ended("load_ok")
        while self.ended("load_ok") <= loads:
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


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    work = tmp_path_factory.mktemp("g")
    with azurite(work / "store") as store, FaultProxy(store.port, free_port()) as proxy:
        store.account().ensure_container(CONTAINER)
        sas = work / "kv.sas.json"
        bed = Bed(None, store, proxy, sas)  # type: ignore[arg-type]
        bed.grant()
        # the launcher makes the container with the key of its embedded KV account: give it this store's
        write_secret(work / "s" / "keys" / f"{EMBEDDED_ACCOUNTS['kv']}.key", store.key.read_text())
        sets = {
            "storage.kv.url": f"http://127.0.0.1:{proxy.port}/{NAME}", "storage.kv.sas_file": sas, "storage.kv.container": CONTAINER,
            "engine.set.dtype": "float32", "engine.set.max_model_len": 768, "engine.set.kv_cache_bytes": HBM * ROW, "components.prefill.replicas": 2,
            "kv.profile": "tiny-cpu", "kv.set.dram_bytes": DRAM * ROW, "kv.set.staging_bytes": 16 * (ROW + 4096), "kv.set.verify_puts": 0,
            "kv.set.lookup_deadline_s": 4.0, "kv.set.load_deadline_s": 5.0, "kv.set.store_deadline_s": 20.0, "kv.set.breaker_errors": 3,
            "kv.set.breaker_open_s": 0.3, "kv.set.breaker_max_open_s": 1.0, "kv.set.epochs_refresh_s": 1.0, "kv.set.epochs_stale_s": 60.0,
        }  # fmt: skip
        with served(
            "disagg", work / "s", model="tiny-full", directory=TINY, profile="tiny-cpu", sets=tuple(f"{k}={v}" for k, v in sets.items())
        ) as graph:  # fmt: skip
            bed.graph = graph
            yield bed
            proxy.heal()


@pytest.fixture
async def bed(started: Bed) -> AsyncIterator[Bed]:
    async with aiohttp.ClientSession() as started.http:
        yield started
        started.proxy.heal()


async def test_computed_once_and_found_again_in_blob(bed: Bed) -> None:
    bed.cold = [await bed.ask(p) for p in bed.prompts]
    assert [c["cached"] for c in bed.cold] == [0] * PROMPTS, "nothing was there yet"
    end = time.monotonic() + 60
    while len(bed.objects()) < PROMPTS * CHUNKS_EACH:
        assert time.monotonic() < end, f"{len(bed.objects())} of {PROMPTS * CHUNKS_EACH} chunks were stored"
        await asyncio.sleep(0.3)
    source = "vllm:prompt_tokens_by_source_total:external_kv_transfer"
    before, loads, reads = await bed.counted(source), bed.ended("load_ok"), bed.proxy.count(method="GET")
    wave = await bed.wave()
    assert not wave.wrong and wave.hits == PROMPTS, vars(wave)
    assert await bed.counted(source) - before >= 10 * 128, "the tiers served, not HBM"
    end = time.monotonic() + 20
    while min(bed.ended("load_ok") - loads, bed.proxy.count(method="GET") - reads) < 10:
        assert time.monotonic() < end, "Blob served, not DRAM"
        await bed.ask(bed.prompts[0])  # the status file is written by steps


async def test_metrics_and_status_say_what_happened(bed: Bed) -> None:
    """TTFT by source, evictions, DRAM used, write amplification, and the KV lines of `dynamo status`."""
    name = "vllm:dynamo_blob_kv_"
    assert await bed.counted(name + "ttft_seconds_count:blob") > 0
    assert await bed.counted(name + "ttft_seconds_count:compute") >= PROMPTS
    assert await bed.counted(name + "dram_evictions_total") > 0
    assert 0 < await bed.counted(name + "dram_used_bytes") <= await bed.counted(name + "dram_bytes") == 2 * DRAM * ROW
    assert 2.0 < await bed.counted(name + "write_amplification") < 2.2, "each worker's is 1 and the headers"
    said = bed.kv()
    assert sum(said[w]["hits"] for w in PREFILL) > 0 and said["decode-0"]["hits"] == 0
    assert all(not said[w]["why"] for w in PREFILL if said[w]["hits"])
    skipped = said["decode-0"]["stores"].get("store_skipped_handed_over", 0)
    assert skipped >= PROMPTS * CHUNKS_EACH, f"a prompt is stored once, by prefill: decode left out {skipped}"


@pytest.mark.parametrize(
    "fault,arg",
    [("status", 503), ("stall", 4000), ("cut", 4000), ("truncate", 1000), ("flip", 9000), ("other", 0), ("reset", 0)],
)
async def test_reads_that_go_wrong(bed: Bed, fault: str, arg: int | str) -> None:
    if fault == "other":
        arg = f"/{NAME}/{CONTAINER}/{bed.objects()[0]}"
    rule = bed.proxy.fault(fault, arg, methods=("GET",), match=CHUNKS)
    await bed.struck(rule, seed=1)


async def test_a_store_that_answers_busy_to_everything(bed: Bed) -> None:
    await bed.struck(bed.proxy.fault("status", 503), seed=2)
    assert not (await bed.wave(seed=3)).wrong
    bed.proxy.heal()
    await bed.recovered()


async def test_stale_index(bed: Bed) -> None:
    """The objects of half of the prompts vanish behind the back of every index."""
    account = bed.store.account()
    for name in bed.objects()[::2]:
        account.delete(CONTAINER, name)
    end = time.monotonic() + 60
    while not bed.ended("load_missing"):
        assert time.monotonic() < end, f"the index did not know: {bed.kv()}"
        assert not (await bed.wave(seed=4)).wrong
    await bed.recovered()


async def test_container_deleted_under_load(bed: Bed) -> None:
    account = bed.store.account()
    running = asyncio.create_task(bed.wave(seed=5))
    account.container(CONTAINER).delete_container()
    waves = [await running, await bed.wave(seed=6)]
    assert not any(w.wrong for w in waves)
    end = time.monotonic() + 30
    while all(bed.kv()[worker]["transport"]["container_ok"] for worker in PREFILL):
        assert time.monotonic() < end, f"a missing container is told from misses: {bed.kv()}"
        await bed.wave(seed=6)
    account.ensure_container(CONTAINER)
    await bed.recovered()
