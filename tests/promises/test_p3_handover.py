"""P3 with prefill and decode apart: KV handed over by NIXL, tiers on both sides. Cases 30, 33 and 35 on the way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from components.common.kv.build import kv_params_for, kv_transfer_config
from components.common.kv.store import WORKERS_PREFIX
from tests.kvtools import kv
from tests.kvtools.azure import Store, free_port, new_container, shared
from tests.kvtools.engines import Driver, Engine
from tests.kvtools.proxy import wait_for
from tests.kvtools.text import ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LEASE_S = 4
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def connector(role: str, lease_s: int) -> dict:
    return {
        "kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": lease_s},
    }  # fmt: skip


class Pair:
    def __init__(self, driver: Driver, store: Store) -> None:
        self.driver, self.store, self.container = driver, store, new_container(store)
        self.p, self.d = self.engine("p", "kv_producer"), self.engine("d", "kv_consumer")

    def engine(self, name: str, role: str, lease_s: int = LEASE_S) -> Engine:
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        # Deadlines that a busy machine keeps: a late lookup is a legal miss, and here hits are asserted.
        settings = kv.settings(self.store, container=self.container, lookup_deadline_s=20.0, load_deadline_s=60.0)
        return self.driver.engine(
            name,
            "tiny-full",
            env=env,
            dtype="float32",
            kv_transfer_config=kv_transfer_config(settings, connector(role, lease_s)),
        )

    def prefill(self, prompt: list[int]) -> dict:
        return self.p.generate(prompt, max_tokens=1, kv={**PREFILL, **kv_params_for("prefill", {}, None)})

    def decode(self, prompt: list[int], handed: dict, **more: object) -> dict:
        return self.d.generate(prompt, kv={**handed["kv"], **kv_params_for("decode", {}, None, remote_kv=True)}, **more)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Driver(tmp_path_factory.mktemp("driver")) as driver:
        yield Pair(driver, shared())


def test_handover_with_a_blob_hit_on_prefill(pair: Pair) -> None:
    prompt = ids(520, seed=1)
    first = pair.decode(prompt, pair.prefill(prompt))
    kv.wait_stored_in(pair.store, pair.container, 4)
    pair.p.forget(dram=True)
    pair.d.forget(dram=True)
    handed = pair.prefill(prompt)
    assert handed["cached"] == 512, "prefill hit the store"
    second = pair.decode(prompt, handed)
    assert kv.same(second, first), kv.band(second, first)
    aggregated = pair.p.generate(prompt)
    assert aggregated["tokens"] == first["tokens"]


def test_decode_looks_nothing_up_but_stores_what_it_generates(pair: Pair) -> None:
    prompt = ids(520, seed=2)
    before = len(kv.chunks(pair.store, pair.container))
    asked = pair.d.metrics("vllm:kv_offload_tiering_chunk_queries")
    answer = pair.decode(prompt, pair.prefill(prompt), max_tokens=270)
    kv.wait_stored_in(pair.store, pair.container, before + 6)
    now = pair.d.metrics("vllm:kv_offload_tiering_chunk_queries")
    secondary = {k: v - asked.get(k, 0) for k, v in now.items() if "tier=1" in k}
    assert sum(secondary.values()) == 0, secondary
    turn = prompt + answer["tokens"] + ids(10, seed=3)
    pair.p.forget(dram=True)
    handed = pair.prefill(turn)
    assert handed["cached"] == 768, (
        "a prefill worker that never saw the answer hits it",
        pair.p.metrics("vllm:kv_offload"),
    )
    assert len(pair.decode(turn, handed)["tokens"]) == 16


def test_case_35_lost_notification_and_case_33_dead_peer(pair: Pair) -> None:
    """Nobody ever pulls: the prefill worker's blocks are free again after the lease."""
    prompt = ids(1000, seed=4)
    usage = lambda: next(v for k, v in pair.p.metrics("vllm:kv_cache_usage_perc").items())  # noqa: E731
    base = usage()
    for i in range(3):
        pair.prefill([*prompt, 7 + i])
    import time

    end = time.monotonic() + LEASE_S * 5
    while time.monotonic() < end:
        pair.p.generate(ids(40, seed=int(time.monotonic() * 1e3)), max_tokens=2)  # the scheduler frees on its steps
        if usage() <= base + 1e-3:
            break
        time.sleep(0.2)
    assert usage() <= base + 1e-3, "blocks of requests nobody pulled are still held"


def test_case_30_decode_after_the_lease_recomputes(pair: Pair) -> None:
    """KV whose lease is over must not be read: its blocks may hold another request by then."""
    import time

    prompt = ids(520, seed=6)
    want = pair.d.generate(prompt, salt="cold")
    handed = pair.prefill(prompt)
    time.sleep(LEASE_S + 3)  # the lease itself is what is tested
    for i in range(4):  # other requests take the blocks
        pair.prefill(ids(1000, seed=50 + i))
    got = pair.decode(prompt, handed)
    assert got["tokens"] == want["tokens"] and kv.band(got, want) < 1e-4
    unguarded = {**handed["kv"], "offered_at": time.time()}  # negative control: the same offer, believed to be fresh
    wrong = pair.d.generate(
        [*prompt, 5], kv={**unguarded, **kv_params_for("decode", {}, None, remote_kv=True)}, salt="x"
    )
    print("read past the lease:", kv.band(wrong, pair.d.generate([*prompt, 5], salt="cold2")))


def test_case_33_prefill_dies_decode_recomputes(pair: Pair) -> None:
    prompt = ids(520, seed=5)
    want = pair.d.generate(prompt, salt="cold")
    handed = pair.prefill(prompt)
    pair.p.stop()
    got = pair.decode(prompt, handed)
    assert got["tokens"] == want["tokens"]
    assert pair.d.generate(ids(100, seed=7), max_tokens=4)["finish"] == "length", "decode stays healthy"


def test_prefill_told_to_end_does_not_wait_for_a_pull_that_never_comes(pair: Pair) -> None:
    """The client left between prefill and decode, the lease (30 s by default) outlives the time that an engine has to end:
    it was killed then, with its tiers open. A worker whose tiers were closed takes its name out of what purges ask."""
    account, known = pair.store.account(), lambda: len(list(account.list(pair.container, WORKERS_PREFIX)))
    before, held = known(), pair.engine("held", "kv_producer", lease_s=300)
    wait_for(lambda: known() == before + 1, 20, "the new worker is known to purges")
    pair.p = held
    pair.prefill(ids(520, seed=8))
    held.stop()
    assert b"force killing" not in pair.driver.log.read_bytes()
    assert known() == before, "the tiers of the engine were not closed"
