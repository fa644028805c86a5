"""P3 and P7 on a whole graph (prefill and decode apart, gateway, router, launcher) while the store of its KV does everything
a store can do: no wrong token, no hang, no lost request.

One start for all phases. HBM and DRAM of the prefill worker are smaller than the working set, so that a wave of all prompts
finds its prefixes in Blob or nowhere. Fp32: every answer equals the one computed when no tier held anything.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from components.common.kv.keys import parse_name
from components.common.kv.objects import HEADER_BYTES, Codec
from components.common.messages.salt import compose
from components.common.storage.sas import new_account_key, write_secret
from graphs.site import EMBEDDED_ACCOUNTS
from tests.e2e.graph import TINY, served
from tests.kvtools import kv
from tests.kvtools.azure import NAME, azurite, free_port
from tests.kvtools.engines import shm_leftovers
from tests.kvtools.graph_bed import (
    CHUNKS,
    CHUNKS_EACH,
    CONTAINER,
    DRAM,
    HBM,
    PREFILL,
    PROMPTS,
    ROW,
    Bed,
    differs,
    shared_memory,
)  # fmt: skip
from tests.kvtools.proxy import FaultProxy
from tests.kvtools.text import ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
            "kv.set.lookup_deadline_s": 4.0, "kv.set.load_deadline_s": 5.0, "kv.set.store_deadline_s": 60.0, "kv.set.breaker_errors": 3,
            "kv.set.breaker_open_s": 0.3, "kv.set.breaker_max_open_s": 1.0, "kv.set.epochs_refresh_s": 1.0, "kv.set.epochs_stale_s": 60.0,
        }  # fmt: skip
        with served(
            "disagg", work / "s", model="tiny-full", directory=TINY, profile="tiny-cpu", sets=tuple(f"{k}={v}" for k, v in sets.items())
        ) as graph:  # fmt: skip
            bed.graph = graph
            bed.frontend = next(x["number"] for x in graph.process("dynamo-frontend-0")["ports"] if x["name"] == "http")
            bed.said = {w: graph.process(w)["config"]["kv"]["settings"]["status_file"] for w in PREFILL}
            logs = [Path(graph.status()["run_dir"], "logs", f"{name}.log") for name in (*PREFILL, "decode-0")]
            yield bed
            proxy.heal()
        said = {log.name: text for log in logs for text in [log.read_text(errors="replace")]}
        bad = ("BufferError", "Failed to shut down", "force killing")
        assert not [name for name, text in said.items() if any(word in text for word in bad)], (
            "an engine with transfers under way did not end well"
        )


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


async def test_worker_killed_during_a_put(bed: Bed) -> None:
    """Kill -9 of a prefill worker whose puts are half way at the store, while requests run. The other one serves; no half is ever found."""
    before, fresh = set(bed.objects()), [ids(128 * CHUNKS_EACH + 7, seed=9000 + i) for i in range(6)]
    half = bed.proxy.fault(
        "half", methods=("PUT",), match=CHUNKS
    )  # nothing is read from Blob meanwhile: all prompts are new
    cold = list(await asyncio.gather(*[bed.ask(p) for p in fresh]))
    victim, end = "", time.monotonic() + 60
    while not victim:  # the status file is written by steps
        assert time.monotonic() < end, f"no put is under way: {half}, {bed.kv()}"
        await bed.ask(ids(64, seed=int(1e3 * (end - time.monotonic()))))
        victim = next((w for w in PREFILL if half.hits and bed.kv()[w]["transport"]["in_flight"]), "")
    row = bed.row(victim)
    tree = [p.pid for p in (psutil.Process(row["pid"]), *psutil.Process(row["pid"]).children(recursive=True))]
    shared = set().union(*map(shared_memory, tree))
    assert shared and os.getpgid(row["pid"]) == row["pid"]
    running = asyncio.create_task(bed.wave(seed=11, at_once=6))
    await asyncio.sleep(0.2)  # some of them are at the victim
    os.killpg(row["pid"], signal.SIGKILL)
    assert not (wave := await running).wrong, wave.wrong
    assert not (wave := await bed.wave(seed=12, at_once=6)).wrong, wave.wrong
    assert set(bed.objects()) == before, "what was half written is visible"
    bed.proxy.heal()
    await bed.recovered()
    for prompt, want in zip(fresh, cold, strict=True):
        assert not differs(await bed.ask(prompt), want)
    end = time.monotonic() + 180
    while (now := bed.row(victim))["restarts"] == row["restarts"] or now["state"] != "ready":
        assert time.monotonic() < end, f"no successor: {now}"
        await asyncio.sleep(1.0)  # it starts on the cores that would answer
    assert not shared & shm_leftovers(), "shared memory of the killed engine"
    written = bed.written(victim)
    while bed.written(victim) == written:
        assert time.monotonic() < end, "the successor does not serve"
        await asyncio.gather(*[bed.ask(ids(64, seed=i + int(1e3 * (end - time.monotonic())))) for i in range(6)])
    account = bed.store.account()
    assert {len(account.get(CONTAINER, name)) for name in set(bed.objects()) - before} <= {HEADER_BYTES + ROW}


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
