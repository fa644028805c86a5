"""P4: a step's time is taken from that step, also where the next ones are scheduled before its output is there."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from components.common.kv import policy as engine_policy
from components.common.kv.connector import DynamoBlobConnector
from components.common.kv.policy import CostConnector
from components.common.kv.steps import Steps


class Bench:
    """The connector's account of steps on a clock of ours; vLLM's part is the order of the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.requests, self.seen = 100.0, 0, list[tuple[int, float]]()
        monkeypatch.setattr(engine_policy.time, "monotonic", lambda: self.now)
        for name, result in (("build_connector_meta", None), ("update_connector_output", None), ("take_events", ())):
            monkeypatch.setattr(DynamoBlobConnector, name, lambda *a, result=result: result)
        prefill = SimpleNamespace(observe_step=lambda tokens, pairs, reach, s, d: self.seen.append((tokens, s)))
        fetched: list[tuple[Any, ...]] = []
        self.fetched = fetched
        c = self.connector = object.__new__(CostConnector)
        c._steps, c._open, c._copies, c._told, c._status_due = Steps(set()), {}, {}, set(), 0.0
        c._cost = SimpleNamespace(
            status_file="", untaught=set(), deadlines={},
            policy=SimpleNamespace(prefill=prefill, fetched=lambda *a: fetched.append(a)),
        )  # type: ignore[assignment]  # fmt: skip

    def schedule(self, tokens: int) -> None:
        self.requests += 1
        rid = f"r{self.requests}"
        new = [SimpleNamespace(req_id=rid, prompt_token_ids=[0] * tokens, num_computed_tokens=0)] if tokens else []
        out: Any = SimpleNamespace(
            total_num_scheduled_tokens=tokens, scheduled_new_reqs=new, finished_req_ids=set(),
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={rid: tokens} if tokens else {},
        )  # fmt: skip
        self.connector.build_connector_meta(out)

    def output(self, *, transfers: bool, received: str = "") -> None:
        """What `Scheduler.update_from_output` does: the transfers only where there are some, then the events."""
        if transfers or received:
            said: Any = SimpleNamespace(finished_recving={received} if received else set(), finished_sending=set())
            self.connector.update_connector_output(said)
        self.connector.take_events()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


@pytest.mark.parametrize("transfers", [False, True])
def test_steps_without_tokens_do_not_take_the_time_of_the_next(bench: Bench, transfers: bool) -> None:
    """Two scheduled ahead: one empty, one of 512 tokens that takes two seconds."""
    bench.schedule(0)
    bench.schedule(512)
    bench.now += 0.1
    bench.output(transfers=transfers)  # of the empty one
    bench.schedule(1024)
    bench.now += 2.0
    bench.output(transfers=True)
    bench.now += 4.0
    bench.output(transfers=True)
    assert bench.seen == [(512, pytest.approx(2.0)), (1024, pytest.approx(4.0))]


def test_an_output_without_transfers_ends_its_step(bench: Bench) -> None:
    bench.schedule(512)
    bench.now += 2.0
    bench.output(transfers=False)
    bench.schedule(1024)
    bench.now += 4.0
    bench.output(transfers=True)
    assert bench.seen == [(512, pytest.approx(2.0)), (1024, pytest.approx(4.0))]


def test_a_copy_that_began_beside_a_pass_is_not_measured_after_it(bench: Bench) -> None:
    """vLLM starts loads after the forward pass and reports them with the next output, which may compute nothing."""
    bench.schedule(512)
    bench.connector._copies = {"a": (bench.now, 1000)}
    bench.now += 3.0
    bench.output(transfers=False)
    bench.schedule(0)
    bench.output(transfers=False, received="a")
    bench.connector._copies = {"b": (bench.now, 1000)}
    bench.schedule(0)
    bench.now += 0.02
    bench.output(transfers=False, received="b")
    assert bench.fetched == [("dram", 1000, pytest.approx(0.02))]


def test_who_came_while_prompt_tokens_were_computed_found_another_one(bench: Bench) -> None:
    """Decided when that step is over, it sees an idle engine: what counts is when it came."""
    steps = bench.connector._steps
    bench.schedule(512)
    assert steps.computing_since(bench.now)
    bench.now += 2.0
    bench.output(transfers=False)
    assert steps.computing_since(bench.now - 1.0) and not steps.computing_since(bench.now)


def test_an_account_that_raises_does_not_end_the_engine(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    bench.connector._cost.policy.prefill.observe_step = broken  # type: ignore[method-assign]
    bench.schedule(512)
    bench.output(transfers=True)
    assert "KV-COST" in caplog.text


def test_vllm_asks_for_events_once_an_output() -> None:
    """The one call that comes with every output; when it moves, the pairing of steps and outputs moves with it."""
    source = inspect.getsource(Scheduler.update_from_output)
    assert source.count("self.connector.take_events()") == 1
    assert source.index("_update_from_kv_xfer_finished(") < source.index("self.connector.take_events()")
