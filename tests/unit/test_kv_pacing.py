"""While an engine only waits for transfers it rests; whatever there is to see ends the rest."""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from components.common.kv import pacing
from tests.kvtools.fixtures import names, stored
from tests.kvtools.proxy import FaultProxy, wait_for


def took(inbox: queue.Queue[int]) -> float:
    began = time.monotonic()
    pacing.rest(inbox)
    return time.monotonic() - began


def test_the_engine_rests_while_a_load_is_under_way_and_no_longer(make, proxy: FaultProxy, monkeypatch) -> None:
    writer, reader = make(), make()
    stored(writer, names(3))
    monkeypatch.setattr(pacing, "REST_S", 30.0)
    monkeypatch.setattr(pacing, "_tiers", [reader.tier])
    inbox: queue.Queue[int] = queue.Queue()
    assert reader.tier.awaited() is False and took(inbox) < 5, "nothing is awaited"
    rule = proxy.fault("hold", methods=("GET",), match="/" + "0" * 32)
    context = reader.request(chunks=names(3))
    wait_for(
        lambda: reader.scan(context, names(3)) is None and not reader.step() and rule.hits >= 3, 20, "three are held"
    )
    assert reader.tier.awaited() is True
    threading.Timer(0.3, inbox.put, (1,)).start()
    assert 0.2 < took(inbox) < 15, "a client's message ends it"
    inbox.get()
    threading.Timer(0.3, proxy.heal).start()
    assert 0.2 < took(inbox) < 15, "so does the end of the load"
    assert reader.tier.awaited() is None, "there is something to see"
    assert reader.hit(context, names(3)) == 3
    assert reader.tier.awaited() is False


def test_it_rests_while_puts_are_under_way(make, proxy: FaultProxy, monkeypatch) -> None:
    writer = make()
    monkeypatch.setattr(pacing, "REST_S", 30.0)
    monkeypatch.setattr(pacing, "_tiers", [writer.tier])
    proxy.fault("hold", methods=("PUT",), match="/" + "0" * 32)
    context = writer.request(chunks=names(1))
    writer.hit(context, names(1))
    writer.put(context, names(1))
    wait_for(lambda: not writer.step() and writer.tier.awaited(), 20, "the put is under way")
    threading.Timer(0.3, proxy.heal).start()
    assert 0.2 < took(queue.Queue()) < 15 and writer.tier.awaited() is None
    writer.settle()
    assert writer.tier.awaited() is False


def test_an_open_question_is_not_slept_over(make, proxy: FaultProxy) -> None:
    """A request in its lookups asks step after step; puts of others that are under way must not delay it."""
    writer, reader = make(), make()
    stored(writer, names(2))
    rule = proxy.fault("hold", methods=("HEAD",), match="/" + "0" * 32)
    context = reader.request(chunks=names(2))
    assert reader.scan(context, names(2)) is None
    reader.step()
    wait_for(lambda: rule.hits >= 1, 20, "the store is asked")
    assert reader.tier.awaited() is None
    proxy.heal()
    assert reader.hit(context, names(2)) == 2


def test_a_rest_is_bounded(make, proxy: FaultProxy, monkeypatch) -> None:
    writer, reader = make(), make()
    stored(writer, names(1))
    monkeypatch.setattr(pacing, "_tiers", [reader.tier])
    proxy.fault("hold", methods=("GET",), match="/" + "0" * 32)
    context = reader.request(chunks=names(1))
    wait_for(lambda: reader.scan(context, names(1)) is None and not reader.step() and reader.tier.awaited(), 20, "held")
    assert pacing.REST_S <= took(queue.Queue()) < 5
    monkeypatch.setattr(pacing, "REST_S", 30.0)
    monkeypatch.setattr(pacing, "_copying", lambda: True)
    assert took(queue.Queue()) < 5, "a copy between HBM and DRAM is over in milliseconds"
    proxy.heal()


def test_vllms_core_still_has_the_step_that_is_amended() -> None:
    """Moves with the pinned vLLM: a step's end is `post_step(model_executed)`, and clients speak through `input_queue`."""
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

    plain = vars(EngineCore)["post_step"]
    assert list(inspect.signature(plain).parameters) == ["self", "model_executed"]
    assert "self.post_step(model_executed)" in inspect.getsource(EngineCoreProc._process_engine_step)
    assert "self.input_queue = queue.Queue[" in inspect.getsource(EngineCoreProc.__init__)
    pacing.install((), lambda: False)
    amended = EngineCoreProc.post_step
    pacing.install((), lambda: False)
    assert EngineCoreProc.post_step is amended is not plain
    in_company: Any = object.__new__(DPEngineCoreProc)
    in_company.check_for_draft_tokens = False
    in_company.post_step(False)  # has no inbox: a rest would fail
    alone: Any = object.__new__(EngineCoreProc)
    alone.check_for_draft_tokens = False
    alone.post_step(True)
    empty, full = (
        (None, SimpleNamespace(total_num_scheduled_tokens=0), None),
        (None, SimpleNamespace(total_num_scheduled_tokens=9), None),
    )
    alone.batch_queue = deque([empty, full])
    alone.post_step(False)
    for queued in (None, deque(), deque([empty])):
        alone.batch_queue = queued
        with pytest.raises(AttributeError):
            alone.post_step(False)
    source = inspect.getsource(EngineCore.step_with_batch_queue)
    assert "batch_queue.appendleft((future, scheduler_output, exec_future))" in source
