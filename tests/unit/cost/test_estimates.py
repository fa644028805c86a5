"""Estimates of fetch and prefill times: right from clean data, robust to stalls, quick to follow a change."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim.grid import profile
from components.common.cost.config import HardwareProfile, TierPrior
from components.common.cost.estimate import Fit
from components.common.cost.fetch import Fetch
from components.common.cost.prefill import Prefill

MB = 1_000_000


def blob(fixed_s: float = 0.05, rate: float = 3e9, spread: float = 1.0) -> Fetch:
    return Fetch(TierPrior(name="blob", fixed_s=fixed_s, bytes_per_s=rate, spread=spread))


@pytest.mark.parametrize("rate", [0.5e9, 2e9, 9e9])
def test_learns_latency_and_rate_of_a_store(rate: float) -> None:
    rng, fetch = random.Random(1), blob()
    for _ in range(20):
        n = rng.randrange(50, 3000) * MB
        fetch.observe(n, (0.08 + n / rate) * math.exp(rng.gauss(0, 0.05)))
    assert fetch.bytes_per_s == pytest.approx(rate, rel=0.12)
    for n in (100 * MB, 1000 * MB, 3000 * MB):
        assert fetch.seconds(n) == pytest.approx(0.08 + n / rate, rel=0.12)


@pytest.mark.parametrize("factor", [0.1, 0.3, 3.0, 10.0])
def test_follows_a_sudden_change_of_speed(factor: float) -> None:
    rng, fetch = random.Random(2), blob()
    rate = 2e9

    def observe() -> None:
        n = rng.randrange(100, 2000) * MB
        fetch.observe(n, (0.08 + n / rate) * math.exp(rng.gauss(0, 0.08)))

    for _ in range(40):
        observe()
    assert fetch.changes == 0, "noise is not a change"
    rate *= factor
    for _ in range(5):
        observe()
    assert fetch.changes >= 1
    assert fetch.seconds(1000 * MB) == pytest.approx(0.08 + 1e9 / rate, rel=0.25)


def test_one_stall_does_not_move_the_estimate() -> None:
    rng, fetch = random.Random(3), blob()
    for _ in range(20):
        n = rng.randrange(100, 2000) * MB
        fetch.observe(n, (0.08 + n / 2e9) * math.exp(rng.gauss(0, 0.05)))
    before = fetch.seconds(1000 * MB)
    fetch.observe(1000 * MB, 20 * before)
    assert fetch.changes == 0
    assert fetch.seconds(1000 * MB) < 1.35 * before


def test_a_load_given_up_behind_others_does_not_count_as_ten_times_as_slow() -> None:
    """Seen in the simulator: 1 GB behind 1.5 GB of others, given up after 2.1 s at 0.5 GB/s; the fit said 0.24 GB/s."""
    fetch = blob()
    fetch.observe(57 * MB, 0.1616)
    fetch.gave_up(963 * MB, 0, 2.1, 1507 * MB)
    assert fetch.seconds(963 * MB, 1507 * MB) < 5.2, "true: 5.0 s"
    fetch = blob()
    fetch.gave_up(963 * MB, 0, 2.1)
    assert fetch.seconds(963 * MB) > 4.0, "nothing before it and nothing came: slow"


def test_bytes_queued_before_count_like_own() -> None:
    fetch = blob()
    assert fetch.seconds(100 * MB, 900 * MB) == pytest.approx(fetch.seconds(1000 * MB))


def test_a_load_given_up_is_news_only_when_late() -> None:
    fetch = blob(spread=0.1)
    expected = fetch.seconds(1000 * MB)
    fetch.gave_up(1000 * MB, 990 * MB, expected / 2)
    assert fetch.observed == 0 and fetch.seconds(1000 * MB) == expected
    fetch.gave_up(1000 * MB, 333 * MB, expected)
    assert fetch.observed == 1 and fetch.seconds(1000 * MB) > expected


def test_uncertainty_shrinks_with_data_and_grows_with_age() -> None:
    fetch = blob()
    first = fetch.predict(1000 * MB)
    for n in (400, 900, 1500, 300, 1100):
        fetch.observe(n * MB, 0.05 + n * MB / 3e9)
    learned = fetch.predict(1000 * MB)
    assert learned.sd < first.sd / 3
    for _ in range(50):
        fetch.tick()
    assert fetch.predict(1000 * MB).sd > 1.5 * learned.sd


def test_says_when_it_extrapolates() -> None:
    fetch = blob()
    assert "never measured" in fetch.predict(MB).beyond
    fetch.observe(10 * MB, 0.06)
    assert fetch.predict(39 * MB).beyond == ""
    far = fetch.predict(41 * MB)
    assert "41000000" in far.beyond and "10000000" in far.beyond
    prefill = Prefill(profile("h200-8b"))
    assert prefill.predict(122_880).beyond == ""
    assert "200000" in prefill.predict(200_000).beyond
    assert "65536" in Prefill(profile("h200-32b")).predict(122_880).beyond, "the estimated point is not a measurement"
    guess = Prefill(profile("cpu-smollm2"))
    assert "estimate" in guess.predict(512).beyond
    guess.observe(2048, 0, 6.0)
    assert guess.predict(512).beyond == "" and guess.predict(4096).beyond != ""


@pytest.mark.parametrize("name", ["h200-8b", "h200-32b", "cpu-smollm2"])
def test_prefill_reproduces_the_profile_it_starts_from(name: str) -> None:
    shape = profile(name)
    prefill = Prefill(shape)
    for point in shape.curve:
        tolerance = 0.02 if not shape.estimate else 0.10
        assert prefill.seconds(point.tokens) == pytest.approx(point.seconds, rel=tolerance)


def test_prefill_of_a_tail_costs_what_the_whole_costs_less_the_head() -> None:
    prefill = Prefill(profile("h200-8b"))
    whole, head, tail = prefill.seconds(65_536), prefill.seconds(32_768), prefill.seconds(32_768, 32_768)
    assert head + tail == pytest.approx(whole, rel=0.01)
    assert tail > 1.5 * head, "attention over the context"


def test_prefill_learns_an_engine_half_as_fast() -> None:
    rng, prefill, truth = random.Random(4), Prefill(profile("h200-8b")), Prefill(profile("h200-8b"))
    for _ in range(10):
        n = rng.randrange(1000, 60_000)
        prefill.observe(n, 0, 2 * truth.seconds(n) * math.exp(rng.gauss(0, 0.03)))
    for n in (2000, 20_000, 60_000):
        assert prefill.seconds(n) == pytest.approx(2 * truth.seconds(n), rel=0.15)


def quadratic(tokens: int, context: int) -> float:
    """SmolLM2 as measured on two cores (2.4 s at 512 tokens, 5.3, 14, 42 and 114 at 8,000): its profile knows a tenth of that curvature."""
    return 3.8e-3 * tokens + 2.6e-6 * tokens * (context + tokens / 2)


@pytest.mark.parametrize("slower", [1.0, 0.1, 2.5])
def test_long_prompts_that_bend_the_curve_are_not_a_slower_engine(slower: float) -> None:
    """The first long steps were far off, the whole curve was scaled, and short prompts were loaded at 1.5x for ever."""
    prefill = Prefill(profile("cpu-smollm2"), 2048)
    luck = random.Random(5)

    def serve(tokens: int, loaded: int = 0) -> None:
        for start in range(loaded, tokens, 2048):
            now = min(2048, tokens - start)
            prefill.observe(now, start, slower * quadratic(now, start) * luck.uniform(0.95, 1.1))

    for i in range(20):
        serve((512, 1024)[i % 2])
    before = prefill._fit.changes
    serve(2048, 768)
    serve(4096, 2432)
    assert prefill._fit.changes == before
    for tokens in (512, 1024, 2048, 4096):
        exact = sum(quadratic(min(2048, tokens - start), start) for start in range(0, tokens, 2048)) * slower
        assert prefill.seconds(tokens) == pytest.approx(exact, rel=0.2), tokens


def test_an_engine_that_becomes_slower_is_still_a_change(slower: float = 2.0) -> None:
    """Control of the one above: the same lengths, twice the seconds."""
    prefill = Prefill(profile("cpu-smollm2"), 2048)
    for i in range(20):
        prefill.observe((512, 1024)[i % 2], 0, quadratic((512, 1024)[i % 2], 0))
    before = prefill._fit.changes
    for i in range(4):
        prefill.observe((512, 1024)[i % 2], 0, slower * quadratic((512, 1024)[i % 2], 0))
    assert prefill._fit.changes == before + 1
    assert prefill.seconds(1024) == pytest.approx(slower * quadratic(1024, 0), rel=0.1)


def test_decoding_sequences_slow_prefill() -> None:
    prefill = Prefill(profile("h200-8b"))
    assert prefill.seconds(16_384, 0, 100) - prefill.seconds(16_384) == pytest.approx(2 * 100 * 0.000045)


def test_curve_must_rise() -> None:
    with pytest.raises(ValueError, match="rise"):
        HardwareProfile(
            name="x",
            source="x",
            estimate=True,
            kv_bytes_per_token=1,
            curve=({"tokens": 10, "seconds": 2}, {"tokens": 20, "seconds": 1}),
        )  # type: ignore[arg-type]


rows = st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(0, 1e10), st.floats(1e-6, 1e6)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(rows=rows, a=st.floats(1e-6, 1.0), b=st.floats(1e-12, 1e-6))
def test_whatever_it_sees_weights_stay_finite_and_not_negative(
    rows: list[tuple[float, float, float]], a: float, b: float
) -> None:
    fit = Fit((a, b), (1.0, 1.0))
    for one, many, seconds in rows:
        fit.observe((one, many), seconds)
        mean, sd, _ = fit.predict((1.0, 1e9))
        assert all(math.isfinite(w) and w >= 0 for w in fit.weights)
        assert math.isfinite(mean) and mean >= 0 and math.isfinite(sd) and sd >= 0


@given(x=st.sampled_from([math.nan, math.inf, -1.0, 0.0]))
def test_nonsense_is_ignored(x: float) -> None:
    fit = Fit((1.0, 1.0), (1.0, 1.0))
    fit.observe((1.0, 1.0), x)
    assert fit.observed == 0


@settings(max_examples=60, deadline=None)
@given(
    small=st.integers(1, 10**10),
    more=st.integers(0, 10**10),
    queued=st.integers(0, 10**10),
    seen=st.lists(st.tuples(st.integers(1, 10**10), st.floats(1e-4, 1e3)), max_size=10),
)
def test_more_bytes_never_predict_less_time(small: int, more: int, queued: int, seen: list[tuple[int, float]]) -> None:
    fetch = blob()
    for nbytes, seconds in seen:
        fetch.observe(nbytes, seconds)
    assert fetch.seconds(small, queued) <= fetch.seconds(small + more, queued)
    assert fetch.seconds(small) <= fetch.seconds(small, queued)
