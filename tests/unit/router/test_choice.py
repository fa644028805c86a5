"""Which worker, and what is booked: the arithmetic, without Dynamo."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from components.common.messages.router import Decide, Note
from router.bookings import Bookings
from router.config import RouterConfig
from router.decide import Decider
from router.score import Candidate, Overlap, Weights, choose, credit_blocks, overlap_of

BS = 16


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakePool:
    """Workers with prefix caches of whole prompts: {worker: {first block: blocks held}}."""

    def __init__(self, workers: int) -> None:
        self.ids = list(range(1, workers + 1))
        self.held: dict[int, dict[tuple[int, ...], int]] = {w: {} for w in self.ids}

    def workers(self) -> list[int]:
        return list(self.ids)

    async def overlaps(self, ids: list[int], salt: str) -> dict[int, Overlap]:
        key = tuple(ids[:BS])
        return {w: Overlap(n, n, n) for w in self.ids if (n := self.held[w].get(key, 0))}

    def prefilled(self, worker: int, ids: list[int]) -> None:
        self.held[worker][tuple(ids[:BS])] = len(ids) // BS


def decider(pool: FakePool | None, ttl: float = 120.0) -> Decider:
    return Decider(RouterConfig(name="r", namespace="n", block_size=BS, listen="unix:/x", booking_ttl_s=ttl), pool)


def ask(n: int, ids: list[int]) -> Decide:
    return Decide(n=n, rid=f"r{n}", ids=ids)


def test_credit_falls_with_the_tier() -> None:
    w = Weights(host=0.5, blob=0.25)
    assert credit_blocks(Overlap(4, 4, 4), w) == 4
    assert credit_blocks(Overlap(4, 8, 8), w) == 6
    assert credit_blocks(Overlap(4, 8, 16), w) == 8
    assert credit_blocks(Overlap(0, 0, 0), w) == 0
    assert overlap_of({"device_blocks": 10, "host_pinned_blocks": 20, "disk_blocks": 30}) == Overlap(10, 20, 30)
    assert overlap_of({"device_blocks": 10, "host_pinned_blocks": 0, "disk_blocks": 0}) == Overlap(10, 10, 10)


def test_the_holder_wins_until_its_queue_costs_more_than_the_recompute() -> None:
    held = Overlap(60, 60, 60)  # 960 of 1,000 tokens
    for queued, winner in ((0, 1), (900, 1), (1100, 2)):
        choice = choose([Candidate(1, held, queued, 5.0), Candidate(2, Overlap(), 0, 1.0)], 1000, BS)
        assert choice is not None and choice.worker == winner, queued


def test_less_than_a_block_of_difference_goes_to_the_worker_used_least_recently() -> None:
    for queued, winner in ((0, 2), (BS - 1, 2), (BS + 1, 1)):
        choice = choose([Candidate(1, Overlap(), 0, 9.0), Candidate(2, Overlap(), queued, 3.0)], 100, BS)
        assert choice is not None and choice.worker == winner, queued
    assert choose([], 100, BS) is None


def test_bookings_end_with_a_note_with_time_and_with_number() -> None:
    clock = Clock()
    b = Bookings(ttl_s=10, most=3, clock=clock)
    b.book("a", 1, 100)
    b.book("b", 1, 50)
    b.book("b", 2, 70)  # asked again: the old one ends
    assert (b.tokens(1), b.tokens(2), len(b)) == (100, 70, 2)
    assert b.end("a") is not None and b.end("a") is None and b.tokens(1) == 0
    clock.now += 11
    assert b.sweep() == 1 and len(b) == 0 and b.expired == 1
    for i in range(5):
        b.book(f"c{i}", 1, 1)
    assert len(b) == 3 and b.expired == 3
    b.forget([1])
    assert len(b) == 0
    b.check_integrity()


def test_bookings_are_the_sum_of_their_parts_whatever_happens() -> None:
    rng, clock = random.Random(4), Clock()
    b = Bookings(ttl_s=5, most=50, clock=clock)
    for i in range(5000):
        step = rng.randrange(5)
        if step < 2:
            b.book(f"r{rng.randrange(100)}", rng.randrange(4), rng.randrange(1000))
        elif step == 2:
            b.end(f"r{rng.randrange(100)}")
        elif step == 3:
            clock.now += rng.random()
            b.sweep()
        elif i % 50 == 0:
            b.forget([rng.randrange(4)])
        if i % 100 == 0:
            b.check_integrity()
    b.check_integrity()


async def test_no_pool_no_worker_and_a_broken_index_are_answers_not_errors() -> None:
    assert "no prefill pool" in (await decider(None).decide(ask(1, [1]))).error
    assert "no prefill worker" in (await decider(FakePool(0)).decide(ask(1, [1]))).error

    class Broken(FakePool):
        async def overlaps(self, ids: list[int], salt: str) -> dict[int, Overlap]:
            raise RuntimeError("index lost")

    d = await decider(Broken(1)).decide(ask(7, [1]))
    assert (d.n, d.prefill) == (7, None) and "index lost" in d.error


async def test_a_dead_worker_is_never_named_and_its_bookings_go() -> None:
    pool = FakePool(2)
    d = decider(pool)
    prompt = list(range(160))
    pool.prefilled(1, prompt)
    assert (await d.decide(ask(1, prompt))).prefill == 1
    pool.ids.remove(1)
    assert (await d.decide(ask(2, prompt))).prefill == 2
    assert d.bookings.tokens(1) == 0 and set(d.used) == {2}


async def test_a_request_that_ended_while_it_was_decided_books_nothing() -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    class Slow(FakePool):
        async def overlaps(self, ids: list[int], salt: str) -> dict[int, Overlap]:
            asked.set()
            await go.wait()
            return {}

    d = decider(Slow(1))
    task = asyncio.create_task(d.decide(ask(1, [1] * 50)))
    await asked.wait()
    d.note(Note(op="done", rid="r1"))
    go.set()
    await task
    assert len(d.bookings) == 0


@pytest.mark.parametrize("in_flight", [1, 8])
async def test_case_37_a_hot_prefix_under_load_does_not_pin_one_worker(in_flight: int) -> None:
    """dynamo#737: all traffic to 1 of 8. Every prompt shares 2,048 tokens; load makes the pool take part."""
    pool = FakePool(8)
    d = decider(pool)
    prefix, shares, running = list(range(2048)), Counter[int](), []
    for n in range(800):
        ids = prefix + [n] * 256
        found = await d.decide(ask(n, ids))
        assert found.prefill is not None
        shares[found.prefill] += 1
        running.append((n, found.prefill, ids))
        if len(running) >= in_flight * 8:
            m, w, done = running.pop(0)
            pool.prefilled(w, done)
            d.note(Note(op="done", rid=f"r{m}"))
    mean = 800 / 8
    assert max(shares.values()) / mean <= 1.5, shares


async def test_case_38_no_worker_is_left_without_work() -> None:
    """dynamo#7836: 2 of 5 idle. One request at a time, distinct prompts with the same chat template in front."""
    pool = FakePool(5)
    d = decider(pool)
    shares = Counter[int]()
    for n in range(100):
        ids = [*range(10), *([n + 50] * 400)]
        found = await d.decide(ask(n, ids))
        assert found.prefill is not None
        shares[found.prefill] += 1
        pool.prefilled(found.prefill, ids)
        d.note(Note(op="done", rid=f"r{n}"))
    assert min(shares[w] for w in pool.ids) >= 10, shares


async def test_a_repeated_prompt_stays_with_its_holder() -> None:
    """The other side of 37 and 38: spreading must not cost affinity."""
    pool = FakePool(5)
    d = decider(pool)
    rng = random.Random(1)
    prompts = [[k] * 400 for k in range(12)]
    held: dict[int, int] = {}
    for n in range(200):
        k = rng.randrange(12)
        found = await d.decide(ask(n, prompts[k]))
        assert found.prefill is not None
        assert found.prefill == held.setdefault(k, found.prefill)
        pool.prefilled(found.prefill, prompts[k])
        d.note(Note(op="done", rid=f"r{n}"))
    assert len(set(held.values())) == 5


async def test_case_42_the_mismatch_gauge_tells_a_wrong_index_from_a_right_one() -> None:
    """llm-d-router#2274 and others: a score silently 0, events dropped. Prediction and the worker's own count are compared."""
    right, wrong = decider(FakePool(1)), decider(FakePool(1))
    for d, served in ((right, 160), (wrong, 0)):
        assert d.pool is not None
        prompt = list(range(170))
        d.pool.prefilled(1, prompt)  # type: ignore[attr-defined]
        for n in range(100):
            found = await d.decide(ask(n, prompt))
            assert found.overlap_blocks == 10
            d.note(Note(op="first", rid=f"r{n}"))
            d.note(Note(op="done", rid=f"r{n}", served=1, cached_tokens=served))

    def ratio(d: Decider) -> float:
        return d.metrics.registry.get_sample_value("dynamo_blob_router_index_mismatch_ratio") or 0.0

    assert ratio(right) == 0.0 and ratio(wrong) > 0.7
    missing = wrong.metrics.registry.get_sample_value(
        "dynamo_blob_router_mismatch_tokens_total", {"worker": "1", "side": "missing"}
    )
    assert missing == 100 * 160


async def test_a_request_another_worker_served_is_no_evidence_against_the_index() -> None:
    d = decider(FakePool(2))
    found = await d.decide(ask(1, [1] * 100))
    other = 2 if found.prefill == 1 else 1
    d.note(Note(op="done", rid="r1", served=other, cached_tokens=96))
    assert d.metrics.registry.get_sample_value("dynamo_blob_router_index_mismatch_ratio") == 0.0


async def test_case_44_an_abort_storm_leaves_no_booking() -> None:
    """prod-stack PR#1055 and others: requests that end in every order, twice, or before they began."""
    d = decider(FakePool(4))
    rng = random.Random(2)
    live: list[int] = []
    for n in range(3000):
        await d.decide(ask(n, [n] * rng.randrange(1, 300)))
        live.append(n)
        if rng.random() < 0.9:
            m = live.pop(rng.randrange(len(live)))
            for op in rng.choices(("first", "done"), k=rng.randrange(1, 4)):
                d.note(Note(op=op, rid=f"r{m}"))
            d.note(Note(op="done", rid=f"r{m}"))
        d.note(Note(op="done", rid=f"unknown{n}"))
    for m in live:
        d.note(Note(op="done", rid=f"r{m}"))
    assert len(d.bookings) == 0 and not d._deciding and not d._predicted
    d.bookings.check_integrity()
