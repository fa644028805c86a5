"""P3: the KV tiers never change an answer.

Control: an HBM prefix hit at the same chunk border in the same engine, alone in the batch. A tier hit must equal it bit for
bit in tokens and top-5 logprobs of every position. The negative controls show that the comparison would notice.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kvtools import kv
from tests.kvtools.azure import Store, azurite
from tests.kvtools.engines import Driver, Engine
from tests.kvtools.text import ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

N, CHUNKS = 520, 4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with azurite(tmp_path_factory.mktemp("azurite")) as store:
        store.account().ensure_container(kv.CONTAINER)
        yield store


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Driver(tmp_path_factory.mktemp("driver")) as driver:
        yield driver


@pytest.fixture(scope="module")
def engine(driver: Driver, store: Store) -> Iterator[Engine]:
    with driver.engine("a", "tiny-full", **kv.engine_args(kv.settings(store))) as engine:
        yield engine


def control(engine: Engine, prompt: list[int]) -> tuple[dict, dict]:
    """(cold run, HBM hit at the last chunk border)."""
    cold = engine.generate(prompt)
    assert cold["cached"] == 0
    hbm = engine.generate(prompt)
    assert hbm["cached"] == len(prompt) // 128 * 128
    again = engine.generate(prompt)
    print(f"run-to-run band of HBM hits: {kv.band(hbm, again)}; cold to hit: {kv.band(cold, hbm)}")
    assert kv.same(again, hbm), "the control itself is not repeatable"
    assert cold["tokens"] == hbm["tokens"], "fp32: a hit's tokens equal a cold run's"
    return cold, hbm


@pytest.mark.parametrize("n", [300, 520, 1000, 1900])
def test_dram_and_blob_hits_equal_an_hbm_hit(engine: Engine, store: Store, n: int) -> None:
    prompt = ids(n, seed=n)
    before = len(kv.chunks(store))
    _, hbm = control(engine, prompt)
    kv.wait_stored(store, before + n // 128)
    for dram in (False, True):
        engine.forget(dram=dram)
        hit = engine.generate(prompt)
        assert hit["cached"] == n // 128 * 128 and kv.same(hit, hbm), ("blob" if dram else "dram", kv.band(hit, hbm))


@pytest.mark.parametrize("gone", range(CHUNKS))
def test_partial_hit_when_a_chunk_is_missing(engine: Engine, store: Store, gone: int) -> None:
    """The hit ends at the first missing chunk; the answer equals an HBM hit of just that prefix."""
    prompt = ids(N, seed=100 + gone)
    before = set(kv.chunks(store))
    engine.generate(prompt)
    kv.wait_stored(store, len(before) + CHUNKS)
    mine = [c for c in kv.chunks(store) if c not in before]
    engine.forget(dram=True)
    engine.forget()
    salt = f"control-{gone}"
    if gone:
        engine.generate([*prompt[: gone * 128], 7], salt=salt)  # exactly `gone` chunks of the prefix are in HBM
    control = engine.generate(prompt, salt=salt)
    assert control["cached"] == gone * 128
    engine.forget(dram=True)
    order = _in_prompt_order(engine, store, prompt, mine)
    store.account().delete(kv.CONTAINER, order[gone])
    hit = engine.generate(prompt)
    assert hit["cached"] == gone * 128, f"chunk {gone} of {CHUNKS} is gone"
    assert kv.same(hit, control), kv.band(hit, control)


def _in_prompt_order(engine: Engine, store: Store, prompt: list[int], names: list[str]) -> list[str]:
    import os

    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    os.environ["PYTHONHASHSEED"] = "0"
    kv_cache_utils.init_none_hash(sha256_cbor)
    parent, out = kv_cache_utils.NONE_HASH, []
    for i in range(len(prompt) // 128):
        parent = kv_cache_utils.hash_block_tokens(sha256_cbor, parent, prompt[i * 128 : (i + 1) * 128], None)
        out.append(next(n for n in names if n.endswith(parent.hex())))
    return out


def damaged(engine: Engine, store: Store, seed: int, how: str) -> tuple[list[int], dict, list[str]]:
    """Prompt, its HBM-hit control, and its chunks in order after damaging the second one in the store."""
    prompt = ids(N, seed=seed)
    before = set(kv.chunks(store))
    _, hbm = control(engine, prompt)
    kv.wait_stored(store, len(before) + CHUNKS)
    order = _in_prompt_order(engine, store, prompt, [c for c in kv.chunks(store) if c not in before])
    account = store.account()
    data = account.get(kv.CONTAINER, order[1])
    if how == "flip":
        worse = kv.flip(data, layer=1, layers=2)
    elif how == "swap":
        other = account.get(kv.CONTAINER, order[2])
        worse = data[: kv.HEADER_BYTES] + other[kv.HEADER_BYTES :]
    elif how == "other object":
        worse = account.get(kv.CONTAINER, order[2])
    elif how == "truncate":
        worse = data[:-1000]
    else:
        worse = b""
    account.put(kv.CONTAINER, order[1], worse)
    engine.forget(dram=True)
    return prompt, hbm, order


@pytest.mark.parametrize("how", ["flip", "swap", "other object", "truncate", "empty"])
def test_a_damaged_chunk_is_a_miss_and_the_answer_is_right(engine: Engine, store: Store, how: str) -> None:
    prompt, hbm, _ = damaged(engine, store, seed=hash(how) % 1000 + 2000, how=how)
    got = engine.generate(prompt)
    assert got["cached"] == 128, "the hit ends before the damaged chunk"
    assert got["tokens"] == hbm["tokens"] and kv.band(got, hbm) < 1e-4


@pytest.fixture(scope="module")
def unproven(driver: Driver, store: Store, engine: Engine) -> Iterator[Engine]:
    """The same engine with the proof at load switched off: what the comparison must notice."""
    with driver.engine("unproven", "tiny-full", **kv.engine_args(kv.settings(store, unsafe_skip_proof=True))) as engine:
        yield engine


@pytest.mark.parametrize("how", ["flip", "swap"])
def test_negative_control_the_comparison_notices(engine: Engine, unproven: Engine, store: Store, how: str) -> None:
    prompt, hbm, _ = damaged(engine, store, seed=hash(how) % 1000 + 3000, how=how)
    got = unproven.generate(prompt)
    assert got["cached"] == CHUNKS * 128, "without proof the damaged chunk is used"
    assert not kv.same(got, hbm), "the comparison did not notice"
    assert kv.band(got, hbm) > 1e-4


def test_fresh_process_hits_what_another_stored(driver: Driver, engine: Engine, store: Store) -> None:
    prompt = ids(N, seed=4000)
    before = len(kv.chunks(store))
    _, hbm = control(engine, prompt)
    kv.wait_stored(store, before + CHUNKS)
    with driver.engine("fresh", "tiny-full", **kv.engine_args(kv.settings(store))) as fresh:
        hit = fresh.generate(prompt)
        assert hit["cached"] == CHUNKS * 128 and kv.same(hit, hbm)


def test_second_turn_hits_the_first_answer(engine: Engine, store: Store) -> None:
    """Chunks that decode wrote are stored too; the next turn hits question and answer."""
    prompt = ids(N, seed=5000)
    before = len(kv.chunks(store))
    first = engine.generate(prompt, max_tokens=270)
    kv.wait_stored(store, before + (N + 269) // 128)
    turn = prompt + first["tokens"] + ids(10, seed=5001)
    hbm = engine.generate(turn)
    assert hbm["cached"] == 768
    engine.forget(dram=True)
    hit = engine.generate(turn)
    assert hit["cached"] == 768 and kv.same(hit, hbm)


def test_prompt_logprobs_are_never_served_from_a_tier(engine: Engine) -> None:
    prompt = ids(300, seed=6000)
    engine.generate(prompt)
    engine.forget()
    scored = engine.generate(prompt, extra={"prompt_logprobs": 1})
    assert scored["cached"] == 0


def test_tenants_share_nothing(engine: Engine, store: Store) -> None:
    """P6 at every tier: the same prompt under another salt finds nothing (case 24)."""
    from components.common.messages.salt import compose

    salts = [str(compose(t, "default", b"k" * 32, "")) for t in ("one", "two")]
    prompt = ids(N, seed=7000)
    before = len(kv.chunks(store))
    params = [{"tenant": s[:32], "class": "default"} for s in salts]
    cold = engine.generate(prompt, salt=salts[0], kv=params[0])
    kv.wait_stored(store, before + CHUNKS)
    assert engine.generate(prompt, salt=salts[1], kv=params[1])["cached"] == 0
    engine.forget(dram=True)
    third = engine.generate(
        prompt, salt=str(compose("three", "default", b"k" * 32, "")), kv={"tenant": "3" * 32, "class": "default"}
    )
    assert third["cached"] == 0
    own = engine.generate(prompt, salt=salts[0], kv=params[0])
    assert own["cached"] == CHUNKS * 128 and own["tokens"] == cold["tokens"]
