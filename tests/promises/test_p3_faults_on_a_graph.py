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

from components.common.kv import explain
from components.common.kv.keys import PUBLIC, parse_name
from components.common.kv.objects import Codec
from components.common.messages.router import Decide, Decision, Note
from components.common.messages.salt import compose
from components.common.storage.sas import issue, new_account_key, write_secret
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
            bed.frontend = next(x["number"] for x in graph.process("dynamo-frontend-0")["ports"] if x["name"] == "http")
            bed.said = {w: graph.process(w)["config"]["kv"]["settings"]["status_file"] for w in PREFILL}
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
    end = time.monotonic() + 120
    while (wave := await bed.wave()).hits < PROMPTS:  # a load that a busy machine makes late is a legal miss
        assert not wave.wrong and time.monotonic() < end, vars(wave)
    assert not wave.wrong, wave.wrong
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
    said = {worker: tiers[0] for worker, tiers in bed.graph.status()["kv"].items()}
    assert sum(said[w]["hits"] for w in PREFILL) > 0 and said["decode-0"]["hits"] == 0
    assert all(not said[w]["why"] for w in PREFILL if said[w]["hits"])
    left_out = said["decode-0"]["stores"]  # "present" where decode heard of prefill's put first
    skipped = left_out.get("store_skipped_handed_over", 0) + left_out.get("store_skipped_present", 0)
    assert skipped >= PROMPTS * CHUNKS_EACH, f"a prompt is stored once, by prefill: decode left out {left_out}"
    assert left_out["store_skipped_handed_over"] and not said["decode-0"]["ends"].get("store_ok")


async def test_the_router_credits_a_tenants_blocks_in_blob_to_that_tenant_only(bed: Bed) -> None:
    """STORAGE events through the relay, with their salt. Everything else pushes the tenant's blocks out of HBM and DRAM."""
    owner, rival = (str(compose(name, "default", b"k" * 32, "")) for name in ("acme", "rival"))
    prompts, stored = [ids(128 * CHUNKS_EACH + 9, seed=8000 + i) for i in range(2)], len(bed.objects())
    for prompt in prompts:
        assert (await bed.ask(prompt, owner))["cached"] == 0
    end = time.monotonic() + 60
    while len(kv.chunks(bed.store, CONTAINER)) < stored + 2 * CHUNKS_EACH:
        assert time.monotonic() < end, "the tenant's chunks are not stored"
        await asyncio.sleep(0.1)
    for seed in (20, 21):
        assert not (await bed.wave(seed)).wrong
    end = time.monotonic() + 60
    while (found := await bed.credited(owner, prompts)) != [CHUNKS_EACH] * 2 or (
        sum(all_ := await bed.credited("", bed.prompts)) + sum(found) <= len(PREFILL) * (HBM + DRAM)
    ):
        assert time.monotonic() < end, f"the index knows {found} of the tenant's blocks, {all_} of the others'"
        await asyncio.sleep(0.3)
    assert await bed.credited(rival, prompts) == await bed.credited("", prompts) == [0, 0], "of nobody else"
    assert await bed.credited(owner, bed.prompts) == [0] * PROMPTS, "nor are unsalted blocks the tenant's"
    end = time.monotonic() + 60
    while (await bed.ask(prompts[0], owner))["cached"] < 128 * CHUNKS_EACH:
        assert time.monotonic() < end, "what is credited is not there"


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


async def test_killed_and_restarted_under_load_with_credentials_revoked_between(bed: Bed) -> None:
    """The store dies under load; it comes back and refuses everybody's token; then it comes back with the key that it had."""
    running = asyncio.create_task(bed.wave(seed=7))
    bed.store.kill()
    assert not (await running).wrong and not (await bed.wave(seed=8)).wrong
    right = bed.store.key.read_text()
    write_secret(bed.store.key, new_account_key())
    await asyncio.to_thread(bed.store.start)
    try:
        end, refused = time.monotonic() + 60, bed.proxy.count(status=403)
        while bed.proxy.count(status=403) == refused:
            assert time.monotonic() < end, "nobody asked the store that refuses"
            assert not (await bed.wave(seed=9)).wrong
    finally:
        bed.store.kill()
        write_secret(bed.store.key, right)
    running = asyncio.create_task(bed.wave(seed=10))
    await asyncio.to_thread(bed.store.start)
    assert not (await running).wrong
    await bed.recovered()


async def test_negative_control_rows_swapped_or_flipped_and_sealed_are_noticed(bed: Bed) -> None:
    """What a store that nobody checks could hand out: another chunk's row, or a byte changed in one layer, under a digest that fits."""
    account, codec, right = bed.store.account(), Codec(ROW), dict[str, bytes]()
    wrong: set[int] = set()
    end = time.monotonic() + 240
    for n in range(100):  # what was lost before is stored again, and forged in the next round
        fresh = [name for name in bed.objects() if name not in right]
        right |= {name: bytes(account.get(CONTAINER, name)) for name in fresh}
        for i, name in enumerate(fresh):
            parsed, other = parse_name(name), right[list(right)[len(right) - len(fresh) + i - 2]]
            assert parsed is not None
            forged = bytearray(kv.flip(right[name], layer=1, layers=2) if i % 2 else other)
            codec.seal(memoryview(forged), parsed.tenant, parsed.namespace, bytes.fromhex(parsed.hash))
            account.put(CONTAINER, name, bytes(forged))
        for i in range(2 * (HBM + DRAM) // CHUNKS_EACH):  # what HBM and DRAM still hold is right: push it out
            await bed.ask(ids(128 * CHUNKS_EACH + 40, seed=100_000 + 100 * n + i))
        wrong |= (await bed.wave(seed=13 + n)).wrong.keys()
        if len(wrong) >= PROMPTS // 2:
            return
        assert time.monotonic() < end, f"the comparison did not notice: {wrong}"
