"""Both ends at once: how a tail shrinks, who may have it, and the private interfaces of vLLM it leans on."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import LookupResult

from bench.crossover import hardware, policy
from components.common.errors import DynamoBlobError
from components.common.kv.build import kv_transfer_config, scheduler_args
from components.common.kv.overlap import OverlapConnector, Tail
from components.common.kv.overlap_scheduler import OverlapScheduler, overlap_of
from graphs.profiles import merged_kv, read_kv_profile


def test_the_private_interfaces_are_where_they_were() -> None:
    assert vllm.__version__.startswith("0.31.0")
    assert list(inspect.signature(Scheduler._preempt_request).parameters) == [
        "self", "request", "timestamp", "drop_stale_output",
    ]  # fmt: skip
    source = inspect.getsource(Scheduler)
    for name in (
        "self.prev_step_scheduled_req_ids",
        "token_budget = self.max_num_scheduled_tokens",
        "preempted_req_ids=self.reset_preempted_req_ids",
        "self.waiting.prepend_request(request)",
    ):
        assert name in source, name


def walk(lookups: dict[int, list[LookupResult]], end: int) -> Tail:
    """One tail whose chunks are asked for and seen as `OverlapConnector._pump` does, without an engine."""
    tail = Tail(0, end)
    for at in range(end - 1, -1, -1):
        for found in lookups.get(at, [LookupResult.HIT]):
            if at >= tail.asked or at >= tail.floor:
                tail.asked = min(tail.asked, at)
                OverlapConnector._seen(tail, at, found)
    return tail


def test_a_tail_that_came_whole_reaches_down_to_the_front() -> None:
    assert (tail := walk({}, 8)).ready == 0 and tail.end == 8


def test_what_lies_below_a_missing_chunk_is_not_asked_for() -> None:
    tail = walk({4: [LookupResult.MISS]}, 8)
    assert (tail.ready, tail.end, tail.floor, tail.asked) == (5, 8, 5, 5)


def test_a_missing_end_moves_the_end() -> None:
    tail = walk({7: [LookupResult.MISS], 6: [LookupResult.MISS]}, 8)
    assert (tail.ready, tail.end) == (0, 6)


def test_a_chunk_on_its_way_holds_those_below_back() -> None:
    tail = walk({6: [LookupResult.HIT_PENDING]}, 8)
    assert tail.ready == 7, "6 is not there yet, whatever lies below it"


@given(st.lists(st.sampled_from(list(LookupResult)), min_size=1, max_size=12))
def test_what_is_ready_is_a_gapless_run_of_hits(found: list[LookupResult]) -> None:
    tail = walk({i: [f] for i, f in enumerate(found)}, len(found))
    assert 0 <= tail.ready <= tail.end <= len(found)
    assert all(found[i] is LookupResult.HIT for i in range(tail.ready, tail.end))


def walked(load_s: float, *, threads: int, step: int, window: int, chunks: int = 32, compute_s: float = 45.0) -> float:
    """Seconds of a walk of both ends, the real pump against a store of `threads` connections on one link.

    A prompt of `chunks` would compute in `compute_s` (its second half in twice the time of the first) and load in
    `load_s`. What is asked for in one step is one job of vLLM: there when its last chunk is, seen as a step begins.
    """

    def computed(n: int) -> float:
        return compute_s * (n / chunks / 2 + (n / chunks) ** 2 / 2)

    now, front, asked = 0.0, 0, []
    there: dict[int, float] = {}
    free = [0.0] * threads

    def lookup(at: int, _: object) -> LookupResult:
        if at in there:
            return LookupResult.HIT if there[at] <= now else LookupResult.HIT_PENDING
        asked.append(at)
        return LookupResult.HIT_PENDING

    def submit() -> None:
        for _ in asked:
            first = free.index(min(free))
            free[first] = max(free[first], now) + load_s / chunks * threads
        there.update(dict.fromkeys(asked, max(free[: len(asked)], default=0.0)))
        asked.clear()

    status = SimpleNamespace(group_states=[SimpleNamespace(offload_keys=range(chunks))], req_context=None)
    scheduler = SimpleNamespace(_req_status={"r": status}, manager=SimpleNamespace(lookup=lookup))
    me = SimpleNamespace(
        scheduler=scheduler, _group=0, _chunk=1, _window=window, step_tokens=lambda: step, _seen=OverlapConnector._seen
    )
    tail, request = Tail(0, chunks), SimpleNamespace(request_id="r")
    OverlapConnector._pump(me, request, tail, front)  # type: ignore[arg-type]
    submit()
    while front < chunks:
        OverlapConnector._pump(me, request, tail, front)  # type: ignore[arg-type]
        submit()
        if front >= tail.ready:
            break
        now, front = now + computed(min(front + step, chunks)) - computed(front), min(front + step, chunks)
    return now


@pytest.mark.parametrize("ratio", [0.5, 0.7, 1.0, 1.4, 2.0])
def test_the_walk_takes_most_of_the_ideal_gain(ratio: float) -> None:
    """The product's steps of four chunks and eight connections: >= 0.7 of the ideal gain of the formula.

    A whole window asked for at once took 0.43 of it where loading takes 1.4 times as long as computing, none at 2.
    """
    compute, load = 45.0, 45.0 * ratio
    better, ideal = min(compute, load), compute * load / (compute + load)
    took = walked(load, threads=8, step=4, window=16)
    assert (better - took) / (better - ideal) >= 0.7
    assert walked(4 * load, threads=8, step=4, window=16) <= 1.001 * compute, "a slow tail costs nothing"


def test_only_a_graph_that_asks_for_it_gets_another_scheduler(tmp_path: Path) -> None:
    plain = {"dram_bytes": 1 << 20, "policy": policy(hardware(), tmp_path / "s")}
    assert scheduler_args(plain) == {} == scheduler_args({"dram_bytes": 1 << 20})
    assert kv_transfer_config(plain)["kv_connector"] == "CostConnector"
    asked = plain | {"policy": policy(hardware(), tmp_path / "s", overlap=True)}
    assert kv_transfer_config(asked)["kv_connector"] == "OverlapConnector"
    assert scheduler_args(asked) == {
        "scheduler_cls": f"{OverlapScheduler.__module__}.OverlapScheduler", "async_scheduling": False,
    }  # fmt: skip
    assert overlap_of(object()) is None


def test_overlap_needs_a_cost_model() -> None:
    profile, _ = read_kv_profile("smollm2-135m-cpu", "here")
    assert merged_kv(profile, {}, "here", overlap=True)["policy"]["overlap"] is True
    assert "overlap" not in merged_kv(profile, {}, "here")["policy"]
    with pytest.raises(DynamoBlobError, match="KV-OVERLAP"):
        merged_kv(profile, {"policy": {}}, "graph.yaml:7", overlap=True)
