"""P3 in production: a wrong object with a valid digest is found by recomputation, and its chain is quarantined."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.common.kv.chain import chunk_hashes
from components.common.kv.keys import PUBLIC, Namespace, object_name
from components.common.kv.objects import HEADER_BYTES, Codec
from components.common.kv.quarantine import Mark, Quarantine
from components.common.kv.shadow import (
    Condemned,
    Hit,
    Sampler,
    ShadowChecker,
    Tops,
    distance,
    known_namespaces,
    quarantine,
)
from components.common.kv.store import NAMESPACES, KvStore
from tests.kvtools import kv
from tests.kvtools.azure import Store, azurite
from tests.kvtools.engines import Driver, Engine
from tests.kvtools.text import ids

N, CHUNK, EVERY = 520, 128, 4


@given(st.lists(st.integers(0, 30), max_size=400), st.integers(1, 12))
def test_every_object_is_checked_within_every_hits_on_it(hits: list[int], every: int) -> None:
    sampler, since = Sampler(every), dict.fromkeys(range(31), 0)
    for n in hits:
        since[n] += 1
        if sampler.due(hashlib.sha256(bytes([n])).digest()):
            since[n] = 0
        assert since[n] < every, "not checked within `every` hits"


def test_the_sampler_is_bounded() -> None:
    sampler = Sampler(10, capacity=100)
    for n in range(1000):
        sampler.due(hashlib.sha256(n.to_bytes(4, "big")).digest())
    assert len(sampler._hits) <= 100


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({1: -0.5, 2: -1.0}, {1: -0.5, 2: -1.0}, 0.0),
        ({1: -0.5, 2: -1.0}, {1: -0.7, 2: -1.0}, 0.2),
        ({1: -0.5, 2: -4.0}, {1: -0.5, 3: -4.0}, 0.0),  # the last places swapped: nothing parted
        ({1: -0.1, 2: -4.0}, {3: -0.1, 2: -4.0}, 3.9),
        ({}, {1: -0.1}, float("inf")),
    ],
)
def test_distance(a: Tops, b: Tops, expected: float) -> None:
    assert distance(a, b) == pytest.approx(expected)


class Real:
    """The checker's view of a test engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def tops(self, ids_: Sequence[int], salt: str, stored: bool) -> tuple[Tops, int]:
        params = {"tenant": PUBLIC if stored else "", "class": ""}
        if not stored:
            params["kv_load_tiers"] = []  # type: ignore[assignment]
        out = await asyncio.to_thread(self.engine.generate, list(ids_), salt=salt, kv=params, max_tokens=1)
        return {int(t): float(p) for t, p in out["logprobs"][0]}, int(out["cached"])

    def idle(self) -> bool:
        return True


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with azurite(tmp_path_factory.mktemp("azurite")) as store:
        store.account().ensure_container(kv.CONTAINER)
        yield store


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Iterator[Engine]:
    with (
        Driver(tmp_path_factory.mktemp("driver")) as driver,
        driver.engine("a", "tiny-full", **kv.engine_args(kv.settings(store))) as engine,
    ):
        yield engine


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("wrong", [None, 0, 2])
async def test_a_wrong_object_with_a_valid_digest_is_found_and_quarantined(
    engine: Engine, store: Store, wrong: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # as the engine has it
    assert os.environ["PYTHONHASHSEED"] == "0"
    prompt = ids(N, seed=900 + (9 if wrong is None else wrong))
    run = asyncio.to_thread
    before = set(kv.chunks(store))
    await run(engine.generate, prompt, max_tokens=1)
    await run(kv.wait_stored, store, len(before) + N // CHUNK)
    account = store.account()
    notes = [account.get(kv.CONTAINER, b.name) for b in account.list(kv.CONTAINER, NAMESPACES)]
    namespaces = [Namespace.model_validate_json(n) for n in notes]
    keys = chunk_hashes(prompt, "", CHUNK, CHUNK)
    names = [object_name(PUBLIC, f"{namespaces[0].digest()[:24]}{0:08x}", k) for k in keys]
    assert set(names) == set(kv.chunks(store)) - before, "the names are computed as the engine computes them"

    if wrong is not None:  # another prompt's KV under this name, sealed with a valid digest
        other = [c for c in kv.chunks(store) if c not in names] or names[:wrong] + names[wrong + 1 :]
        body = bytearray(account.get(kv.CONTAINER, names[wrong]))
        body[HEADER_BYTES:] = account.get(kv.CONTAINER, other[-1])[HEADER_BYTES:]
        Codec(len(body) - HEADER_BYTES).seal(memoryview(body), PUBLIC, names[0].split("/")[1], keys[wrong])
        account.put(kv.CONTAINER, names[wrong], bytes(body))

    kv_store, gone = KvStore(store.account(), kv.CONTAINER), []
    known = Quarantine(kv_store, CHUNK, refresh_s=1, stale_s=60, closed=False)

    async def condemn(found: Condemned) -> None:
        assert found.hit == Hit(tuple(prompt), "", N // CHUNK * CHUNK) and found.keys == keys[found.first :]
        known.add(PUBLIC, Mark(found.first, found.keys[0].hex()))  # a chunk is one block here
        spaces = await run(known_namespaces, kv_store)
        gone.extend(await run(quarantine, kv_store, [kv.CONTAINER], PUBLIC, spaces, found.keys, lambda n, r: None))

    real = Real(engine)
    checker = ShadowChecker(real, CHUNK, lambda i, s: chunk_hashes(i, s, CHUNK, CHUNK), condemn, every=EVERY, band=0.01)
    hits = 0
    while hits < EVERY and not gone:
        await run(engine.forget, True)
        got = await run(engine.generate, prompt, max_tokens=1)
        hits += 1
        assert got["cached"] == N // CHUNK * CHUNK
        checker.note(Hit(tuple(prompt), "", got["cached"]))
        while checker.waiting:
            finding = await checker.step()
            print(f"wrong={wrong} hit {hits}: {finding}, {dict(checker.counters)}")
    there = set(kv.chunks(store))
    if wrong is None:
        assert checker.counters["wrong"] == 0 and checker.counters["checked"] >= 1 and set(names) <= there
        assert checker.worst_noise < 0.01
    else:
        assert checker.counters["wrong"] == 1 and hits <= EVERY
        assert set(names[:wrong]) <= there and not set(names[wrong:]) & there, "it and its descendants, nothing before"
        # HBM and DRAM still hold it: under its own salt it is answered from; under the salt of the quarantine it is not
        salt = known.suffix(prompt, "")
        assert salt and known.suffix(prompt[: wrong * CHUNK], "") == ""
        truth = await run(engine.generate, prompt, max_tokens=1, salt="fresh", kv={"tenant": "", "class": ""})
        still = await run(engine.generate, prompt, max_tokens=1)
        assert still["cached"] == N // CHUNK * CHUNK and kv.band(still, truth) > 0.01, "control: it is still there"
        for cached in (0, N // CHUNK * CHUNK):
            again = await run(engine.generate, prompt, max_tokens=1, salt=salt, kv={"tenant": "", "class": ""})
            assert again["cached"] == cached and again["tokens"] == truth["tokens"] and kv.band(again, truth) < 1e-3
    kv_store.close()
