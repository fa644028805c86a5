"""P3 with both ends at once (`kv.overlap`): the front computed while the back loads changes no answer.

Engine steps are 64 tokens throughout, so that a front computed in overlap and the control's are the same arithmetic, and so
many that the back comes first. HBM holds two prompts but not what they generate: a batch preempts.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from bench.crossover import policy
from components.common.kv.keys import PUBLIC
from graphs.cli._explain import explained
from tests.faults.proxy import FaultProxy, Rule
from tests.kvtools import kv
from tests.kvtools.azure import Store, azurite
from tests.kvtools.beliefs import believing
from tests.kvtools.engines import Driver, Engine
from tests.kvtools.otlp import Collector, collector
from tests.kvtools.proxy import wait_for
from tests.kvtools.text import ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

N, CHUNKS, ROW, STEP = 1910, 14, 131_072, 64
CHUNK = r"/[0-9a-f]{2}/[0-9a-f]{64}"
OVERLAP, LOAD = ({"tenant": PUBLIC, "kv_cost_mode": mode} for mode in ("overlap", "load"))
AUTO = {"tenant": PUBLIC}
ASKED = ("GET", "HEAD")
FAR_BETTER = {"compute_s": 3200.0, "fixed_s": 0.001, "bytes_per_s": 1e9}
"""Of loading: not even the end of a prompt is computed to learn, as a hundred seconds for a chunk are too many."""
FAR_WORSE = {"compute_s": 0.03, "fixed_s": 1000.0, "bytes_per_s": 1e9}
"""Of loading: not worth a look in the background either, as no store could be faster than this engine."""
CURVE = {
    "name": "t", "source": "test", "estimate": True, "kv_bytes_per_token": 1024,
    "curve": [{"tokens": 128, "seconds": 0.01}, {"tokens": 4096, "seconds": 0.4}],
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with azurite(tmp_path_factory.mktemp("azurite")) as store:
        store.account().ensure_container(kv.CONTAINER)
        yield store


@pytest.fixture(scope="module")
def proxy(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    proxy = FaultProxy("127.0.0.1", store.port, log=tmp_path_factory.mktemp("proxy") / "log").start()
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def traces() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def status(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("status") / "cost.json"


@pytest.fixture(scope="module")
def beliefs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beliefs") / "beliefs.json"


@pytest.fixture(scope="module")
def engine(
    store: Store,
    proxy: FaultProxy,
    traces: Collector,
    status: Path,
    beliefs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    work = tmp_path_factory.mktemp("driver")
    settings = kv.settings(
        store, port=proxy.port, load_deadline_s=60.0, threads=2,
        policy=policy(CURVE, status, overlap=True, overlap_step_tokens=STEP),
    )  # fmt: skip
    args = kv.engine_args(settings, max_num_batched_tokens=STEP, kv_cache_memory_bytes=31 * ROW)
    args["kv_transfer_config"]["kv_connector_extra_config"]["settings"]["policy"] |= {
        "module": "tests.kvtools.beliefs", "class": "Believing", "beliefs": str(beliefs),
    }  # fmt: skip
    with Driver(work, traces.env) as driver, driver.engine("a", "tiny-full", **args) as engine:
        yield engine


def counted(engine: Engine, what: str) -> float:
    """Requests so far. Statistics come with a step, a few times a second: a small request brings them."""
    time.sleep(0.3)
    engine.generate(ids(20, seed=time.monotonic_ns()), max_tokens=1)
    return sum(engine.metrics(f"vllm:dynamo_blob_kv_cost_{what}").values())


def overlapped(engine: Engine) -> float:
    return counted(engine, "overlapped")


def stored(engine: Engine, store: Store, *seeds: int) -> dict[int, tuple[list[int], dict]]:
    """{seed: (prompt, its answer as an HBM hit)}; every chunk is in Blob, none above it."""
    out = {}
    for seed in seeds:
        prompt, before = ids(N, seed=seed), len(kv.chunks(store))
        engine.generate(prompt)
        hbm = engine.generate(prompt)
        assert hbm["cached"] == CHUNKS * 128
        kv.wait_stored(store, before + CHUNKS)
        engine.forget(dram=True)
        out[seed] = (prompt, hbm)
    return out


@contextmanager
def reads(proxy: FaultProxy, *rules: Rule, methods: tuple[str, ...] = ("GET",)) -> Iterator[Counter[str]]:
    """Requests for chunks by name, as the proxy saw them, under `rules`."""
    seen: Counter[str] = Counter()
    began = time.time()
    proxy.rules = list(rules)
    yield seen
    proxy.rules = []
    entries = [json.loads(line) for line in Path(proxy._log.name).read_text().splitlines()]
    stuck = {e["target"] for e in entries if e["fault"] == "stall" and e["t"] < began}  # may be asked for again by now
    for e in entries:
        if e["t"] >= began and e["method"] in methods and e["target"] not in stuck and re.search(CHUNK, e["target"]):
            seen[e["target"]] += 1


def test_the_answer_equals_an_hbm_hit_bit_for_bit(engine: Engine, store: Store, proxy: FaultProxy) -> None:
    [(prompt, hbm)] = stored(engine, store, 1).values()
    jumps = overlapped(engine)
    with reads(proxy) as seen:
        answer = engine.generate(prompt, kv=OVERLAP)
    assert kv.same(answer, hbm) and overlapped(engine) == jumps + 1
    assert 2 <= len(seen) <= CHUNKS and max(seen.values()) == 1, "each chunk of the back was read once"
    engine.forget(dram=True)
    with reads(proxy) as seen:
        plain = engine.generate(prompt, kv=LOAD)
    assert kv.same(plain, hbm) and len(seen) == CHUNKS
    assert overlapped(engine) == jumps + 1, "control: a plain load does not overlap"


@pytest.mark.parametrize("fault", ["flip-middle", "missing-last", "busy-all", "stall-one"])
def test_a_back_that_comes_in_part_or_not_at_all(engine: Engine, store: Store, proxy: FaultProxy, fault: str) -> None:
    [(prompt, hbm)] = stored(engine, store, 10 + len(fault)).values()
    names = kv.chunks(store)[-CHUNKS:]
    rule = {
        "flip-middle": Rule("flip", match=names[8], after=ROW // 2),
        "missing-last": Rule("missing", match=f"GET .*{names[-1]}"),
        "busy-all": Rule("busy", match=f"GET .*{CHUNK}"),
        "stall-one": Rule("stall", match=f"GET .*{names[10]}", after=1000),
    }[fault]
    with reads(proxy, rule) as seen:
        answer = engine.generate(prompt, kv=OVERLAP)
    assert kv.same(answer, hbm) and seen


def test_a_batch_that_does_not_fit_is_preempted_and_answers_the_same(
    engine: Engine, store: Store, proxy: FaultProxy
) -> None:
    prompts = stored(engine, store, 31, 32, 33, 34)
    jumps, before = overlapped(engine), sum(engine.metrics("vllm:num_preemptions").values())
    with reads(proxy):
        asked = {s: engine.begin(p, kv=OVERLAP, max_tokens=24) for s, (p, _) in prompts.items()}
        answers = {s: f.result(300) for s, f in asked.items()}
    for seed, (_, hbm) in prompts.items():
        assert answers[seed]["tokens"][:16] == hbm["tokens"], f"fp32: prompt {seed}"
    jumped = overlapped(engine) - jumps
    preempted = sum(engine.metrics("vllm:num_preemptions").values()) - before
    print(f"{jumped:.0f} jumped, {preempted:.0f} preempted, {[round(a['seconds'], 1) for a in answers.values()]} s")
    assert preempted > jumped > 0, "some were preempted for memory as well"


@pytest.mark.parametrize("after", [0.05, 0.25, 0.5])
def test_abort_at_any_time_leaves_nothing(engine: Engine, store: Store, proxy: FaultProxy, after: float) -> None:
    [(prompt, hbm)] = stored(engine, store, 40 + int(after * 100)).values()
    with reads(proxy):
        engine.generate(prompt, kv=OVERLAP, abort_after=after)
        engine.forget(dram=True)  # asserts that no transfer holds a block
        assert kv.same(engine.generate(prompt, kv=OVERLAP), hbm)


def test_each_decision_is_in_status_metrics_and_the_trace_of_its_request(
    engine: Engine, traces: Collector, status: Path
) -> None:
    """P4: predicted, actual and regret, the same three places over."""

    def written() -> dict:
        time.sleep(1.1)  # written once a second, by a step
        engine.generate(ids(20, seed=time.monotonic_ns()), max_tokens=2, kv=LOAD)
        return json.loads(status.read_text())

    before, told = len(traces.spans), written()
    headers = {"traceparent": "00-" + "1f" * 16 + "-" + "2e" * 8 + "-01"}
    prompt = ids(N, seed=77)
    first = engine.generate(prompt, max_tokens=2, kv={"tenant": PUBLIC}, trace=headers)
    wait_for(lambda: any(s["trace"] == "1f" * 16 for s in traces.spans[before:]), 30, "the span of the request")
    [span] = [s for s in traces.spans if s["trace"] == "1f" * 16]
    assert span["name"] == "kv.cost" and span["parent"] == "2e" * 8
    assert span["kv.cost.load_tokens"] in range(0, N, 128) and span["kv.cost.reason"], (
        "an index that does not know counts as held"
    )
    assert 0 < span["kv.cost.predicted_s"] <= 2 * span["kv.cost.recompute_s"], (
        "switch_gain keeps a way that is a little slower"
    )
    assert 0 < span["kv.cost.actual_s"] <= first["ttft"] + 1.0
    assert abs(span["seconds"] - span["kv.cost.actual_s"]) < 1e-3
    assert 0 <= span["kv.cost.regret_s"] <= span["kv.cost.actual_s"]
    now = written()
    assert now["requests"] == told["requests"] + 1, "a forced request is not counted"
    assert abs(now["served_s"] - told["served_s"] - span["kv.cost.actual_s"]) < 1e-6
    counted = engine.metrics("vllm:dynamo_blob_kv_cost_")
    assert sum(v for k, v in counted.items() if "requests_total" in k) >= told["requests"]
    shown = io.StringIO()
    Console(file=shown, width=200).print(explained("prefill-0", now))
    text = shown.getvalue()
    assert f"{now['requests']} requests" in text and f"actual {now['served_s']:.2f} s" in text and "regret" in text


def test_a_request_that_is_better_computed_asks_the_store_nothing(
    engine: Engine, store: Store, proxy: FaultProxy, beliefs: Path
) -> None:
    """P4: decided before a lookup is paid for, of chunks that the index knows and of chunks that it does not."""
    [(prompt, hbm)] = stored(engine, store, 51).values()
    with believing(beliefs, **FAR_WORSE), reads(proxy, methods=ASKED) as seen:
        computed = engine.generate(prompt, kv=AUTO)
        engine.generate(ids(N, seed=52), kv=AUTO)
    assert not seen and computed["cached"] == 0 and kv.same(computed, hbm)
    engine.forget(dram=True)
    with believing(beliefs, **FAR_BETTER), reads(proxy, methods=ASKED) as seen:
        loaded = engine.generate(prompt, kv=AUTO)
    assert sum(seen.values()) == CHUNKS and loaded["cached"] == CHUNKS * 128 and kv.same(loaded, hbm), "control"
    with believing(beliefs, **FAR_BETTER), reads(proxy, methods=ASKED) as seen:
        engine.generate(ids(N, seed=53), kv=AUTO)
    assert seen, "control: what no index knows is asked for"


def test_what_the_router_allows_is_kept_where_loading_is_far_better(
    engine: Engine, store: Store, proxy: FaultProxy, beliefs: Path
) -> None:
    [(prompt, hbm)] = stored(engine, store, 61).values()
    for allowed, chunks in (({"kv_load_tiers": []}, 0), ({"max_load_tokens": 600}, 4), ({}, CHUNKS)):
        with believing(beliefs, **FAR_BETTER), reads(proxy, methods=ASKED) as seen:
            answer = engine.generate(prompt, kv=AUTO | allowed)
        assert (answer["cached"], sum(seen.values())) == (chunks * 128, chunks), allowed
        assert kv.same(answer, hbm)
        engine.forget(dram=True)


def test_the_policy_plans_both_ends_by_itself(engine: Engine, store: Store, proxy: FaultProxy, beliefs: Path) -> None:
    """Predicted for the prompt: computing 1.0 s, loading 1.1 s, both ends 0.7 s."""
    about_equal = {"compute_s": 2.0, "fixed_s": 0.3, "bytes_per_s": 2.4e6}
    [(prompt, hbm)] = stored(engine, store, 71).values()
    jumps, plans = overlapped(engine), counted(engine, "overlaps_planned")
    with believing(beliefs, **about_equal, overlap_min_tokens=1024), reads(proxy) as seen:
        answer = engine.generate(prompt, kv=AUTO)
    assert kv.same(answer, hbm)
    assert (counted(engine, "overlaps_planned"), overlapped(engine)) == (plans + 1, jumps + 1)
    assert 2 <= len(seen) <= CHUNKS and max(seen.values()) == 1
    engine.forget(dram=True)
    with believing(beliefs, **about_equal):
        short = engine.generate(prompt, kv=AUTO)
    assert kv.same(short, hbm) and short["cached"] == 0
    engine.forget(dram=True)
    engine.generate(prompt, kv=OVERLAP)
    assert counted(engine, "overlaps_planned") == plans + 1, "controls: a prompt too short, and one that was forced"


def test_a_load_later_than_its_decision_allows_is_computed(
    engine: Engine, store: Store, proxy: FaultProxy, beliefs: Path
) -> None:
    """Its 3 s, half of what computing was believed to take; the configuration's 60 s would have brought it whole."""
    [(prompt, hbm)] = stored(engine, store, 81).values()
    missed = counted(engine, "missed_deadlines")
    late = Rule("delay", match=f"GET .*{CHUNK}", seconds=20.0, skip=4, times=1)
    with believing(beliefs, 12.8, 0.01, 1e8), reads(proxy, late) as seen:
        answer = engine.generate(prompt, kv=AUTO)
    assert late.used == 1 and answer["cached"] < len(seen) * 128 and kv.same(answer, hbm)
    assert counted(engine, "missed_deadlines") == missed + 1
