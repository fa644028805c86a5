"""Spans go to the collector that the environment names, into the request's trace; a collector that is away costs nothing."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from components.common.telemetry import spans
from tests.kvtools.otlp import collector
from tests.kvtools.proxy import wait_for

PARENT = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"}


def test_nothing_without_a_collector() -> None:
    assert spans.open_spans("t", {}) is None
    there = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}
    assert spans.open_spans("t", there) is None


def test_a_span_arrives_in_the_trace_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as found:
        for key, value in found.env.items():
            monkeypatch.setenv(key, value)
        mine = spans.open_spans("t")
        assert mine is not None
        mine.record("kv.cost", 1.5, {"kv.cost.actual_s": 1.5}, PARENT)
        mine.record("kv.cost", 0.5, {"kv.cost.actual_s": 0.5})
        wait_for(lambda: len(found.spans) == 2, 20, "two spans")
        mine.record("kv.cost", 0.25, {})
        mine.close(20)  # what waits is sent, before its second is over
        assert len(found.spans) == 3
    mine_, alone, _ = found.spans
    assert mine_["trace"] == "ab" * 16 and mine_["parent"] == "cd" * 8
    assert abs(mine_["seconds"] - 1.5) < 1e-3 and mine_["kv.cost.actual_s"] == 1.5
    assert alone["trace"] != mine_["trace"] and not alone["parent"]


def test_a_collector_that_is_silent_costs_a_bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        )
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        mine = spans.open_spans("t")
        assert mine is not None
        for _ in range(3 * spans.QUEUE):
            mine.record("kv.cost", 0.1, {"kv.cost.actual_s": 0.1}, {"traceparent": "nonsense"})
        waiting = mine._provider._active_span_processor._span_processors[0]._batch_processor._queue
        assert len(waiting) <= spans.QUEUE == waiting.maxlen
        began = time.monotonic()
        mine.close(0.5)
        assert time.monotonic() - began < 5
    wait_for(lambda: not any(t.name.startswith("OtelBatch") for t in threading.enumerate()), 30, "its thread ends")


def test_the_end_of_an_engine_sends_its_last_spans() -> None:
    """vLLM ends a connector by `shutdown`, in the scheduler's process and in each worker's; only the former has spans."""
    from components.common.kv.policy import CostConnector

    said: list[str] = []
    part = SimpleNamespace(shutdown=lambda: said.append("part"))
    scheduler: Any = object.__new__(CostConnector)
    scheduler.connector_worker, scheduler.connector_scheduler = None, part
    scheduler._spans = SimpleNamespace(close=lambda: said.append("spans"))
    scheduler.shutdown()
    assert said == ["part", "spans"]
    worker: Any = object.__new__(CostConnector)
    worker.connector_worker, worker.connector_scheduler = part, None
    worker.shutdown()
    assert said == ["part", "spans", "part"]
