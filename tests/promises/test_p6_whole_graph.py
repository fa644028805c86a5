"""P6 on a whole graph (gateway, router, prefill and decode apart, sweeper, launcher), one start for all of it.

Tenants apart in HBM, DRAM and Blob; `dynamo purge` on the live graph while both tenants ask; a planted wrong object with a
valid digest is found by the prefill worker's own shadow check, and no worker answers from a copy of it any more.
Each "no hit" stands beside a hit of the owner at the same tier.
HBM and DRAM are small, and a tenant whose KV is ephemeral fills them: it pushes others down and leaves nothing in Blob.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from components.common.kv.chain import chunk_hashes
from components.common.kv.keys import PUBLIC, parse_name
from components.common.kv.objects import HEADER_BYTES, Codec
from components.common.messages.salt import compose, tenant_hash
from components.common.messages.tenants import read_salt_key, rotate_salt_key
from components.common.registry.signing import SigningKey, verify
from components.common.storage.account import Account
from components.common.storage.config import AccountConfig
from tests.e2e.graph import DYNAMO, ROOT, TINY, Graph, served, short_directory
from tests.kvtools.text import ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

N, BORDER, ROW, EVERY = 520, 512, 131_072, 4
HBM_BLOCKS, DRAM_CHUNKS, FILLER = 128, 256, 3968
CONTAINER = "kv-default"
KEYS = {"acme": "key-of-acme", "rival": "key-of-rival", "victim": "key-of-victim", "filler": "key-of-filler"}
SETS = (
    "components.frontend.auth=keys", "engine.set.dtype=float32", f"engine.set.kv_cache_bytes={HBM_BLOCKS * ROW}",
    "kv.profile=tiny-cpu", f"kv.set.dram_bytes={DRAM_CHUNKS * ROW}", "kv.set.load_deadline_s=30", "kv.set.lookup_deadline_s=10",
    "kv.set.epochs_refresh_s=0.5", "kv.set.epochs_stale_s=4", "kv.set.store_deadline_s=6", f"kv.set.shadow_every={EVERY}",
    "kv.set.shadow_band=0.01", "components.sweeper.sweep_s=2",
)  # fmt: skip


class Bed:
    def __init__(self, graph: Graph, folder: Path, http: aiohttp.ClientSession) -> None:
        self.graph, self.folder, self.http = graph, folder, http
        plan = graph.plan()
        self.ports = {p["name"]: {x["name"]: x["number"] for x in p["ports"]} for p in plan["processes"]}
        prefill = next(p for p in plan["processes"] if p["name"] == "prefill-0")
        self.account = Account(AccountConfig.model_validate(prefill["config"]["kv"]["settings"]["account"]))
        self.fillers = 0

    async def ask(self, tenant: str, prompt: list[int], tokens: int = 2) -> dict[str, Any]:
        """As a client of `tenant`; "" = straight at Dynamo's frontend, unsalted. {cached, tokens}."""
        url = self.graph.url if tenant else f"http://127.0.0.1:{self.ports['dynamo-frontend-0']['http']}"
        body = {
            "model": self.graph.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
        }
        headers = {"Authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
        async with self.http.post(url + "/v1/completions", json=body, headers=headers) as r:
            answer = await r.json()
            assert r.status == 200, answer
        details = answer["usage"].get("prompt_tokens_details") or {}
        return {"cached": details.get("cached_tokens") or 0, "tokens": answer["choices"][0]["logprobs"]["tokens"]}

    async def fill(self, tier: str) -> None:
        """Push everything of others below `tier`: more ephemeral KV than the tiers above it hold."""
        room = {"hbm": 0, "dram": HBM_BLOCKS, "blob": DRAM_CHUNKS}[tier]
        for _ in range(-(-room // (FILLER // 128)) + 1 if room else 0):
            self.fillers += 1
            await self.ask("filler", ids(FILLER, seed=90_000 + self.fillers), 1)

    def objects(self, tenant: str) -> set[str]:
        prefix = tenant_hash(tenant) if tenant else PUBLIC
        return {b.name for b in self.account.list(CONTAINER, prefix + "/") if parse_name(b.name)}

    async def stored(self, tenant: str, n: int) -> None:
        await until(lambda: len(self.objects(tenant)) >= n, f"{n} objects of '{tenant}'")

    def sweeper(self) -> dict[str, float]:
        """The sweeper's metrics, its prefix taken off."""
        url = f"http://127.0.0.1:{self.ports['sweeper-0']['system']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as r:
            rows = [line.split() for line in r.read().decode().splitlines() if not line.startswith("#")]
        return {name.removeprefix("dynamo_blob_sweeper_"): float(value) for name, value in rows}

    async def source(self, kind: str) -> float:
        """Prompt tokens that the prefill worker took from `kind` so far."""
        return (await self.graph.counters("prefill-0")).get(f"vllm:prompt_tokens_by_source_total:{kind}", 0.0)

    async def metrics(self, process: str) -> list[str]:
        """Lines of a process's metrics."""
        async with self.http.get(f"http://127.0.0.1:{self.ports[process]['system']}/metrics") as r:
            return (await r.text()).splitlines()


async def until(done: Any, what: str, limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not await asyncio.to_thread(done):
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        folder = short_directory()
        stack.callback(lambda: subprocess.run(["rm", "-rf", str(folder)], check=True))
        yield folder


@pytest.fixture(scope="module")
def graph(state: Path) -> Iterator[Graph]:
    rule = {"ttl_s": 3600, "max_ttl_s": 7200, "bytes": "1GiB"}
    for tenant in KEYS:
        rotate_salt_key(state / f"{tenant}.salt")
    (state / "tenants.yaml").write_text(
        yaml.safe_dump({
            "tenants": {
                t: {
                    "keys": [hashlib.sha256(k.encode()).hexdigest()], "salt_key_file": f"{t}.salt",
                    "class": "ephemeral" if t == "filler" else "standard",
                }
                for t, k in KEYS.items()
            },
            "classes": {"standard": rule, "ephemeral": {**rule, "bytes": 0, "ephemeral": True}},
            "default_class": "standard",
        })
    )  # fmt: skip
    with served(
        "disagg", state, model="tiny-full", directory=TINY, profile="tiny-cpu",
        sets=(*SETS, f"components.frontend.tenants_file={state / 'tenants.yaml'}"),
    ) as g:  # fmt: skip
        yield g


@pytest.fixture(scope="module")
async def bed(graph: Graph, state: Path) -> AsyncIterator[Bed]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        bed = Bed(graph, state, http)
        yield bed
        bed.account.close()


async def test_the_sweeper_runs_with_the_graph_and_shows_in_status(bed: Bed) -> None:
    rows = {p["name"]: p["state"] for p in bed.graph.status()["processes"]}
    assert rows["sweeper-0"] == "ready" and rows["prefill-0"] == rows["decode-0"] == "ready"
    await until(lambda: bed.sweeper().get("leading") == 1, "the sweeper leads")


@pytest.mark.parametrize("tier", ["hbm", "dram", "blob"])
async def test_one_prompt_two_tenants_and_nobody_no_hit_across_at_any_tier(bed: Bed, tier: str) -> None:
    prompt = ids(N, seed=4000 + len(tier) + ord(tier[0]))
    before = len(bed.objects("acme"))
    assert (cold := await bed.ask("acme", prompt))["cached"] == 0
    await bed.stored("acme", before + BORDER // 128)
    await bed.fill(tier)
    assert (await bed.ask("rival", prompt))["cached"] == 0, "another tenant"
    assert (await bed.ask("", prompt))["cached"] == 0, "unsalted never matches salted"
    kind = "local_cache_hit" if tier == "hbm" else "external_kv_transfer"
    taken = await bed.source(kind)
    warm = await bed.ask("acme", prompt)
    assert warm["cached"] == BORDER and warm["tokens"] == cold["tokens"], f"control: the owner hits at {tier}"
    assert await bed.source(kind) >= taken + BORDER, f"from {kind}"
    assert (await bed.ask("", prompt))["cached"] == BORDER, "control: unsalted traffic shares with itself"
    assert (await bed.ask("rival", prompt))["cached"] == BORDER, "and so does the other tenant"
    assert not bed.objects("filler"), "ephemeral KV never leaves HBM and DRAM"


async def test_a_purge_on_the_live_graph_is_proven_while_both_tenants_go_on_asking(bed: Bed) -> None:
    mine, theirs = ids(N, seed=4100), ids(N, seed=4200)
    for tenant, prompt in (("acme", mine), ("rival", theirs)):
        before = len(bed.objects(tenant))
        assert (await bed.ask(tenant, prompt))["cached"] == 0
        await bed.stored(tenant, before + BORDER // 128)
    old, kept = bed.objects("acme"), bed.objects("rival")
    swept = bed.sweeper().get("deleted_purged_total", 0.0)
    key, served_ = read_salt_key(bed.folder / "acme.salt"), {"acme": 0, "rival": 0}
    over = asyncio.Event()

    async def load(tenant: str) -> None:
        n = 0
        while not over.is_set():
            n += 1
            await bed.ask(tenant, ids(N, seed=70_000 + 1000 * len(tenant) + n))
            served_[tenant] += 1

    async with asyncio.TaskGroup() as group:
        for tenant in served_:
            group.create_task(load(tenant))
        try:
            purge = await asyncio.create_subprocess_exec(
                *DYNAMO, "purge", "--tenant", "acme", "--state", str(bed.folder), "--json",
                "--report", str(bed.folder / "report.json"), cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, err = await asyncio.wait_for(purge.communicate(), 300)
        finally:
            over.set()
    assert purge.returncode == 0, err.decode()[-2000:]
    assert min(served_.values()) > 2, f"requests ran meanwhile, none was lost: {served_}"
    report = json.loads(out)
    assert report == json.loads((bed.folder / "report.json").read_text())
    public = SigningKey.open(bed.folder / "keys" / "purge.pem").public
    assert verify(report, (public,), kind="PURGE", what="the purge report", where="") == public
    probe = report["probe"]
    assert probe["clean"] and probe["old"] == 0 and probe["asked"] > 0 and probe["pid"] != purge.pid
    assert report["generation"] == 1 and report["salt_key"] == "rotated"
    # The sweeper deletes the old generation too, as soon as it is raised: between them, each object once.
    await until(
        lambda: report["deleted"] + bed.sweeper().get("deleted_purged_total", 0.0) - swept >= len(old),
        f"{len(old)} objects counted as deleted by purge ({report['deleted']}) and sweeper", 20,
    )  # fmt: skip
    assert not old & bed.objects("acme") and kept <= bed.objects("rival"), "all of the one, nothing of the other"
    assert all(name.split("/")[1][24:] == f"{1:08x}" for name in bed.objects("acme")), (
        "what came since is of the new generation"
    )
    assert read_salt_key(bed.folder / "acme.salt") != key
    assert (await bed.ask("acme", mine))["cached"] == 0, "gone from HBM, DRAM and Blob"
    assert (await bed.ask("rival", theirs))["cached"] == BORDER, "control"
    assert (await bed.ask("acme", mine))["cached"] == BORDER, "and the tenant goes on"


async def test_a_planted_wrong_object_is_found_and_no_worker_answers_from_a_copy_of_it(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valid name, length, key and digest, another prompt's KV: only recomputation can tell. Decode has pulled it by then."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # as the engines have it
    prompt, other = ids(N, seed=4300), ids(N, seed=4400)
    known = bed.objects("victim")
    truth = await bed.ask("victim", prompt, 8)
    await bed.ask("victim", other)
    await bed.stored("victim", len(known) + 2 * BORDER // 128)
    salt = str(compose("victim", "standard", read_salt_key(bed.folder / "victim.salt"), ""))
    named = {name.rsplit("/", 1)[1]: name for name in bed.objects("victim")}
    keys, theirs = ([k.hex() for k in chunk_hashes(x, salt, 128, 128)] for x in (prompt, other))
    planted, bodies = [named[k] for k in keys], [named[k] for k in theirs]  # the engine's own names
    for name, body in zip(planted, bodies, strict=True):
        tenant, namespace, _, key = name.split("/")
        raw = bytearray(bed.account.get(CONTAINER, body))
        Codec(len(raw) - HEADER_BYTES).seal(memoryview(raw), tenant, namespace, bytes.fromhex(key))
        bed.account.put(CONTAINER, name, bytes(raw))
    await bed.fill("blob")
    first = await bed.ask("victim", prompt, 8)
    assert first["cached"] == BORDER and first["tokens"] != truth["tokens"], (
        "control: both workers have it, and it is wrong"
    )
    marks, hits = "vllm:dynamo_blob_kv_quarantine_marks", 1
    while hits < EVERY and not (await bed.graph.counters("prefill-0"))[marks]:
        hits += 1
        await bed.ask("victim", prompt, 8)
    for worker in ("prefill-0", "decode-0"):  # decode reads it by itself: nothing was asked since
        end = time.monotonic() + 120
        while (await bed.graph.counters(worker))[marks] != 1:
            assert time.monotonic() < end, f"{worker} does not know, {hits} hits on it and one in {EVERY} is checked"
            await asyncio.sleep(0.1)
    await until(lambda: not set(planted) & bed.objects("victim"), "out of Blob, the wrong chunk and its descendants")
    log = (Path(bed.graph.status()["run_dir"]) / "logs" / "prefill-0.log").read_text(errors="replace")
    assert f"KV-SHADOW-MISMATCH: chunk 0 ({keys[0]})" in log and "KV-QUARANTINE: 4 objects" in log
    metrics = await bed.metrics("prefill-0")
    assert f'key="{keys[0]}"' in next(x for x in metrics if x.startswith("vllm:dynamo_blob_kv_shadow_found{"))
    (wrong,) = (x for x in metrics if "shadow_checks_total{" in x and 'outcome="wrong"' in x)
    assert float(wrong.rsplit(" ", 1)[1]) == 1, "one chain, condemned once"
    assert set(bodies) <= bed.objects("victim"), "nothing else is condemned"
    for cached in (0, BORDER):  # computed anew, then shared again, on both workers
        right = await bed.ask("victim", prompt, 8)
        assert right["tokens"] == truth["tokens"] and right["cached"] == cached
    longer = await bed.ask("victim", [*prompt, *ids(100, seed=4301)])
    assert longer["cached"] == BORDER, "a prompt that goes on from it"
    assert (await bed.ask("victim", other))["cached"] == BORDER, "control: others keep what they have"
