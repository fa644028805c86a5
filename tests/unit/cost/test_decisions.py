"""The decision: bounds, monotonicity, no oscillation, bounded exploration, both ends at once."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim.grid import profile
from components.common.cost.config import CostConfig, TierPrior
from components.common.cost.decide import Held, Loading, Request, Tiers, best, cuts, options, play, soonest, split
from components.common.cost.fetch import Fetch
from components.common.cost.policy import Policy
from components.common.cost.prefill import Prefill
from components.common.cost.traffic import Traffic

CHUNK = 128


def config(blob: float = 3e9, name: str = "h200-8b", **kw: object) -> CostConfig:
    return CostConfig(
        hardware=profile(name),
        tiers=(
            TierPrior(name="dram", fixed_s=0.02, bytes_per_s=40e9, spread=0.3),
            TierPrior(name="blob", fixed_s=0.08, bytes_per_s=blob, spread=1.0, via="dram"),
        ),
        **kw,  # type: ignore[arg-type]
    )


def on_blob(tokens: int, **kw: object) -> Request:
    return Request(tokens, held=(Held("blob", tokens // CHUNK * CHUNK),), **kw)  # type: ignore[arg-type]


requests = st.builds(
    lambda n, local, dram, blob, wait, cap, queued: Request(
        n, min(local, n), (Held("dram", min(local + dram, n)), Held("blob", min(local + dram + blob, n))), wait, 0, {"blob": queued}, cap
    ),
    st.integers(1, 150_000), st.integers(0, 50_000), st.integers(0, 50_000), st.integers(0, 150_000),
    st.floats(0, 100), st.none() | st.integers(0, 150_000), st.integers(0, 10**11),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(request=requests, rate=st.floats(1e6, 1e11))
def test_bounds(request: Request, rate: float) -> None:
    policy = Policy(config(rate))
    d = policy.decide(request)
    held = max((h.end for h in request.held), default=0)
    assert 0 <= d.load_tokens <= max(0, held - request.local)
    if request.max_load_tokens is not None:
        assert d.load_tokens <= request.max_load_tokens
    assert (request.local + d.load_tokens) % CHUNK == 0 or d.load_tokens == 0
    assert d.deadline_s > 0 and (d.load_tokens > 0 or d.deadline_s == math.inf)
    assert d.chosen.price_s - d.explored_s <= d.compute.price_s * 1.000001
    assert all(isinstance(v, (int, float, str)) for v in d.attributes().values())


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.integers(CHUNK, 150_000), slow=st.floats(1e6, 1e11), faster=st.floats(1.0, 100.0), wait=st.floats(0, 20)
)
def test_a_faster_store_never_serves_later_and_never_loads_less_than_nothing(
    tokens: int, slow: float, faster: float, wait: float
) -> None:
    """With the slower store worth a load, the faster is worth one too; the predicted time never grows."""
    request = on_blob(tokens, wait_s=wait)
    a, b = Policy(config(slow)), Policy(config(slow * faster))
    one = best(options(request, a.prefill, a.tiers, CHUNK))
    two = best(options(request, b.prefill, b.tiers, CHUNK))
    assert two.total_s <= one.total_s * (1 + 1e-9)
    assert two.cut > 0 or one.cut == 0


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(2 * CHUNK, 150_000), local=st.integers(0, 100_000), rate=st.floats(1e8, 1e11))
def test_a_longer_local_hit_never_serves_later(tokens: int, local: int, rate: float) -> None:
    policy = Policy(config(rate))
    local = min(local, tokens - 1) // CHUNK * CHUNK
    base = best(options(on_blob(tokens), policy.prefill, policy.tiers, CHUNK)).total_s
    hit = best(options(on_blob(tokens, local=local), policy.prefill, policy.tiers, CHUNK)).total_s
    assert hit <= base * 1.01 + policy.prefill.seconds(1)


@pytest.mark.parametrize(("rate", "loads_from"), [(10e9, 8_300), (5e9, 21_000), (2e9, 99_000)])
def test_break_even_of_the_measured_8b_curve(rate: float, loads_from: int) -> None:
    """facts: 8B on an H200, serial fetch, 99 ms fixed: 8.3k tokens at 10 GB/s, 21k at 5, 99k at 2, never at 1."""
    prefill = Prefill(profile("h200-8b"))
    tiers = Tiers({"blob": Fetch(TierPrior(name="blob", fixed_s=0.099, bytes_per_s=rate))}, 147_456)

    def loads(n: int) -> bool:
        return best(options(on_blob(n), prefill, tiers, CHUNK)).cut > 0

    assert not loads(int(loads_from * 0.85)) and loads(int(loads_from * 1.15))
    slow = Tiers({"blob": Fetch(TierPrior(name="blob", fixed_s=0.099, bytes_per_s=1e9))}, 147_456)
    assert not any(best(options(on_blob(n), prefill, slow, CHUNK)).cut for n in (1024, 16_384, 65_536, 122_880))


def test_the_cut_may_lie_between_two_tiers() -> None:
    """DRAM is worth loading, the Blob part behind it is not."""
    policy = Policy(config(0.2e9))
    d = policy.decide(Request(32_768, held=(Held("dram", 16_384), Held("blob", 32_768))))
    assert d.load_tokens == 16_384


def test_a_queue_before_the_engine_makes_part_of_a_load_free() -> None:
    policy = Policy(config(1e9))
    assert policy.decide(on_blob(16_384)).load_tokens == 0
    waiting = policy.decide(on_blob(16_384, wait_s=1.0))
    assert 0 < waiting.load_tokens < 16_384


def test_unknown_tiers_are_not_used() -> None:
    policy = Policy(config())
    assert policy.decide(Request(32_768, held=(Held("tape", 32_768),))).load_tokens == 0


def test_modes_for_comparison() -> None:
    assert Policy(config(1e6, mode="load")).decide(on_blob(32_768)).load_tokens > 0
    assert Policy(config(1e12, mode="recompute")).decide(on_blob(32_768)).load_tokens == 0


def test_no_oscillation_at_break_even() -> None:
    """At the length where both ways cost the same, noise flips the better one; the choice must not follow it."""

    def switches(gain: float) -> int:
        policy, rng = Policy(config(5e9, switch_gain=gain, probe_every=10**6)), random.Random(5)
        truth = Policy(config(5e9))
        n = 128 * min(
            range(60, 400),
            key=lambda c: abs(truth.tiers.load(on_blob(128 * c), 128 * c).mean - truth.prefill.seconds(128 * c)),
        )
        per = policy.config.hardware.kv_bytes_per_token
        for _ in range(300):
            policy.decide(on_blob(n))
            policy.fetched("blob", n * per, truth.fetches["blob"].seconds(n * per) * math.exp(rng.gauss(0, 0.03)))
            policy.computed(n, 0, truth.prefill.seconds(n) * math.exp(rng.gauss(0, 0.03)))
        return policy.ledger.switches

    assert switches(0.03) <= 6
    assert switches(0.0) >= 20, "negative control: without the band it does oscillate"


def test_a_declined_tier_is_probed_within_the_budget() -> None:
    policy, probes = Policy(config(0.5e9, probe_every=6)), 0
    per = policy.config.hardware.kv_bytes_per_token
    for _ in range(200):
        d = policy.decide(on_blob(16_384))
        assert d.load_tokens == 0
        if d.probe:
            probes += 1
            n = d.probe.tokens * per
            assert 0 < n <= policy.config.probe_bytes
            policy.fetched("blob", n, 0.08 + n / 0.5e9)
        policy.finished(d, d.chosen.total_s)
    account = policy.ledger.report()
    assert 5 <= probes <= 200 // 6 + 2 and account["probes"] == probes
    assert account["probed_s"] <= 0.02 * account["served_s"] + 4 * 0.5
    assert account["explored_s"] == 0, "probes run in the background: no request waited"


def test_the_end_of_a_prompt_is_computed_until_prefill_was_measured() -> None:
    """All is loaded and nothing computed: the engine may be ten times as fast as its profile and nobody would know."""
    policy, tails, per = Policy(config(20e9)), [], 147_456
    for i in range(140):
        d = policy.decide(on_blob(32_768))
        assert d.load_tokens > 0
        tail = 32_768 - d.load_tokens
        policy.fetched("blob", d.load_tokens * per, 0.08 + d.load_tokens * per / 20e9)
        if tail:
            tails.append(i)
            assert tail % CHUNK == 0 and "exploring" in d.reason
            assert policy.prefill.seconds(tail, 32_768 - tail) <= 0.11 * d.chosen.total_s
            policy.computed(tail, 32_768 - tail, policy.prefill.seconds(tail, 32_768 - tail))
        policy.finished(d, d.chosen.total_s)
    assert len(tails) == 10 and tails[2] < 20 and all(b - a >= 18 for a, b in pairwise(tails[2:])), tails
    assert policy.ledger.explored_s <= 0.02 * policy.ledger.served_s + 0.1
    short = on_blob(32_768)._replace(held=(Held("blob", 32_640),))
    assert Policy(config(20e9)).decide(short).load_tokens == 32_640, "128 tokens are computed anyway"


def test_no_probe_where_no_tier_could_win() -> None:
    policy = Policy(config(0.5e9))
    assert all(policy.decide(on_blob(256)).probe is None for _ in range(50))


def test_learns_a_faster_store_within_20_requests_though_it_never_loads() -> None:
    policy = Policy(config(0.3e9))
    per, rate = policy.config.hardware.kv_bytes_per_token, 0.3e9

    def serve() -> bool:
        d = policy.decide(on_blob(32_768))
        tokens = d.load_tokens or (d.probe.tokens if d.probe else 0)
        if tokens:
            policy.fetched("blob", tokens * per, 0.08 + tokens * per / rate)
        if not d.load_tokens:
            policy.computed(32_768, 0, 1.26)
        policy.finished(d, d.chosen.total_s)
        return d.load_tokens > 0

    assert not any([serve() for _ in range(30)][10:])
    rate = 10e9
    after = [serve() for _ in range(30)]
    assert all(after[20:]), after


def test_regret_and_prediction_error_are_counted() -> None:
    policy = Policy(config(10e9))
    d = policy.decide(on_blob(65_536))
    assert d.load_tokens and d.other_s == d.compute.total_s
    outcome = policy.finished(d, d.compute.total_s + 1.0)
    assert outcome.regret_s == pytest.approx(1.0)
    policy.finished(d, d.chosen.total_s)
    report = policy.ledger.report()
    assert report["regret_s"] == pytest.approx(1.0) and report["requests"] == report["loads"] == 2


def test_explains_itself() -> None:
    report = Policy(config()).explain()
    assert [row["tokens"] for row in report["table"]][-1] == 122_880
    assert report["tiers"]["blob"]["measured"] == 0
    row = report["table"][4]
    assert row["recompute_s"] == pytest.approx(0.219, rel=0.02) and row["blob_s"] > row["dram_s"]


def test_both_ends_meet_where_both_take_as_long() -> None:
    policy = Policy(config(4e9))
    request = on_blob(32_768)
    at, seconds = split(request, policy.prefill, policy.tiers, CHUNK, 32_768)
    load, compute = policy.tiers.load(request, 32_768).mean, policy.prefill.seconds(32_768)
    assert 0 < at < 32_768 and seconds < min(load, compute)
    brute = min(
        max(policy.prefill.seconds(m), policy.tiers.load(request._replace(local=m), 32_768).mean)
        for m in range(0, 32_768, CHUNK)
    ) + policy.prefill.seconds(1, 32_767)
    assert seconds == pytest.approx(brute, rel=0.02)


def test_overlap_is_planned_only_where_it_wins() -> None:
    near = Policy(config(4e9, overlap=True)).decide(on_blob(32_768))
    assert near.overlap_from is not None and near.overlap_s < near.other_s * 0.85
    assert Policy(config(4e9)).decide(on_blob(32_768)).overlap_from is None, "off by default"
    assert Policy(config(4e9, overlap=True)).decide(on_blob(2_048)).overlap_from is None, "2k tokens: declined"
    assert Policy(config(0.5e9, overlap=True)).decide(on_blob(32_768)).overlap_from is None, "load 4x slower: declined"
    assert Policy(config(40e9, overlap=True)).decide(on_blob(32_768)).overlap_from is None, "load 4x faster: declined"


def test_one_that_comes_back_from_loading_while_this_computes_is_priced() -> None:
    """First come, first served does not interrupt: who is loaded in 0.1 s waits for the rest of a prefill of 1.26 s."""
    policy = Policy(config(3e9))
    request = on_blob(32_768)
    alone = policy.decide(request)
    assert alone.load_tokens == 0 and alone.compute.others_s == 0
    compute_s = alone.compute.compute.mean
    back = request._replace(loading=(Loading(0.1, 0.01), Loading(0.2, 0.01), Loading(compute_s + 1, 0.01)))
    decision = policy.decide(back)
    assert decision.compute.others_s == pytest.approx(2 * compute_s - 0.3, rel=0.05)
    assert decision.load_tokens > 0 and decision.chosen.others_s < 0.1


def test_first_come_first_served_by_hand() -> None:
    loading = [Loading(1.0, 2.0), Loading(5.0, 1.0)]
    assert play(0.0, loading, None) == (0.0, 3.0 + 6.0)
    assert play(0.0, loading, Loading(0.0, 2.0)) == (2.0, 4.0 + 6.0), "computes first: one waits a second for it"
    assert play(1.5, loading, Loading(0.0, 2.0)) == (5.5, 3.5 + 6.5), "ready when the engine is free: goes before"
    assert play(0.0, loading, Loading(6.0, 1.0)) == (7.0, 9.0)
    assert play(1.0, [], Loading(0.0, 2.0)) == (3.0, 0.0)


def test_the_link_has_a_price_where_others_load() -> None:
    """At break-even one way alone would be a crowd: while all load, computing has to look better than a long load."""

    def price(share: float) -> tuple[float, float]:
        policy = Policy(config(5e9))
        for i in range(30):
            policy.traffic.arrived(float(i))
            policy.traffic.decided(1.0, share)
        whole = options(on_blob(32_768), policy.prefill, policy.tiers, CHUNK, policy.traffic)
        return whole[0].others_s, whole[-1].others_s

    (engine, link), (same, free) = price(1.0), price(0.0)
    assert engine == same > 0
    assert free < 0.02 * engine, "nobody else loads: only its last token is in anybody's way"
    assert link == pytest.approx(0.75 / 2 * (32_768 * 147_456 / 5e9) ** 2, rel=0.2)


def test_probes_of_two_sizes_tell_latency_from_rate() -> None:
    """From probes of one chunk a store of 0.5 GB/s and one of 10 cannot be told apart: 0.12 s and 0.08 s, noise 25 %."""
    policy, sizes = Policy(config(0.5e9)), set()
    per = policy.config.hardware.kv_bytes_per_token
    for _ in range(120):
        d = policy.decide(on_blob(16_384))
        if d.probe:
            sizes.add(d.probe.tokens)
            policy.fetched("blob", d.probe.tokens * per, 0.08 + d.probe.tokens * per / 0.5e9)
        policy.finished(d, d.chosen.total_s)
    assert len(sizes) >= 2
    assert policy.fetches["blob"].bytes_per_s == pytest.approx(0.5e9, rel=0.25)


def test_cuts_respect_cap_and_chunks() -> None:
    assert cuts(on_blob(1000), CHUNK)[-1] == 896
    assert cuts(on_blob(1000, max_load_tokens=300), CHUNK)[-1] == 256
    assert cuts(on_blob(1000, max_load_tokens=0), CHUNK) == [0]


def test_what_others_promote_into_is_not_probed() -> None:
    """A prefix in DRAM that is recomputed: reading it "in the background" reads nothing and would be charged for ever."""
    policy = Policy(config(0.05e9))
    for i in range(500):
        short = Request(256 + 128 * (i % 6), held=(Held("dram", 256),))
        assert policy.decide(short).probe is None
    declined = sum(policy.decide(on_blob(32_768)).probe is not None for _ in range(50))
    assert declined >= 5, "the budget is there for a tier that can be read"


def test_a_tier_that_is_loaded_from_in_part_is_not_read_in_the_background_as_well() -> None:
    """That load measures it; the read would go past the router's cap, and its cost be booked for nothing."""
    capped = Policy(config(20e9)).decide(on_blob(32_768, max_load_tokens=16_400))
    assert capped.load_tokens == 16_384 and capped.probe is None
    explored = Policy(config(20e9)).decide(on_blob(32_768))
    assert 0 < explored.load_tokens < 32_768 and explored.explored_s > 0 and explored.probe is None


def test_a_look_at_a_declined_tier_keeps_to_the_routers_cap() -> None:
    d = Policy(config(0.5e9)).decide(on_blob(32_768, max_load_tokens=300))
    assert d.load_tokens == 0 and d.probe is not None and d.probe.tokens == 256
    control = Policy(config(0.5e9)).decide(on_blob(32_768))
    assert control.probe is not None and control.probe.tokens > 256


def test_nothing_is_probed_or_charged_where_the_index_does_not_know() -> None:
    policy = Policy(config(0.05e9))
    assert all(policy.decide(on_blob(32_768, certain=False)).probe is None for _ in range(50))
    assert policy.ledger.probes == 0 and policy.decide(on_blob(32_768)).probe is not None


def test_a_decision_undone_by_its_caller_is_a_recompute_in_every_field() -> None:
    policy = Policy(config(30e9))
    d = policy.decide(on_blob(65_536))
    assert d.load_tokens and policy.ledger.explored_s == d.explored_s > 0
    undone = policy.instead(d, "why")
    assert policy.ledger.explored_s == undone.explored_s == 0
    assert (undone.load_tokens, undone.chosen, undone.deadline_s, undone.overlap_from) == (0, d.compute, math.inf, None)
    assert undone.other_s == d.chosen.total_s and undone.attributes()["kv.cost.reason"] == "why"


def test_overlap_is_not_planned_beside_others_that_load() -> None:
    policy = Policy(config(5e9, overlap=True))
    for _ in range(4):  # else the end of the prompt is computed to measure it
        policy.computed(8_192, 0, policy.prefill.seconds(8_192))
    assert policy.decide(on_blob(8_192, loading=(Loading(0.0, 0.5),))).overlap_from is None


def test_a_crowd_that_loads_keeps_the_engine_busy_whole() -> None:
    """What is looked at one by one is bounded, what is reckoned with is not."""
    crowd = tuple(Loading(i / 100, 0.1) for i in range(1000))
    d = Policy(config(2e9)).decide(on_blob(32_768, loading=crowd))
    assert d.chosen.total_s > 90, "a hundred seconds of prefill come first"
    assert [len(soonest(crowd[:n])) for n in (0, 32, 33, 1000)] == [0, 32, 33, 33]
    assert sum(x.compute_s for x in soonest(crowd)) == pytest.approx(100)


@pytest.mark.parametrize("chunk", [16, 32, 128])
def test_ends_tried_while_prefill_is_unknown_are_long_enough_and_few(chunk: int) -> None:
    """An engine whose steps of fewer than 64 tokens are not measured, and one that never measures any."""
    ten = profile("h200-32b")
    slow = ten.model_copy(update={"curve": tuple(p.model_copy(update={"seconds": 10 * p.seconds}) for p in ten.curve)})
    policy = Policy(config(30e9, chunk_tokens=chunk).model_copy(update={"hardware": slow}))
    tried = []
    for i in range(200):
        d = policy.decide(on_blob(2_048, at=float(i)))
        if d.reason.startswith("exploring"):
            tried.append(2_048 - d.load_tokens)
        policy.finished(d, d.chosen.total_s)
    assert tried and min(tried) >= 64
    assert policy.ledger.explored_s < 0.1 * 200 * d.chosen.total_s


def test_a_load_given_up_was_measured_as_far_as_it_came() -> None:
    fetch = Fetch(TierPrior(name="blob", fixed_s=0.01, bytes_per_s=1e9))
    fetch.gave_up(1000_000_000, 10_000_000, 5.0)
    assert "largest measured 10000000" in fetch.predict(1000_000_000).beyond
    assert not fetch.predict(20_000_000).beyond


def test_arrivals_seen_out_of_order_are_not_counted_twice() -> None:
    traffic = Traffic()
    for at in (0.0, 2.0, 1.0, 3.0, 4.0):
        traffic.arrived(at)
    assert traffic.rate == pytest.approx(1.0, rel=0.1)
