"""Case 26 (dynamo#6101): a tier that is slow or hung. The policy declines it per request; what it cannot foresee ends at the deadline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from bench.crossover import hardware, policy
from components.common.kv import hooks
from components.common.kv.policy import CostPolicy
from tests.kvtools.fixtures import names, stored
from tests.kvtools.manager import data, key


def test_a_slow_store_costs_its_deadline_once_then_the_breaker_spares_the_rest(make, proxy) -> None:
    chunks = names(4)
    stored(make(), chunks)
    reader = make(load_deadline_s=0.5, lookup_deadline_s=0.5, breaker_errors=2, breaker_open_s=30.0)
    proxy.fault("delay", 3.0)
    began = time.monotonic()
    assert reader.hit(reader.request(chunks=chunks), chunks) == 0
    first = time.monotonic() - began
    assert first < 3
    i = 0
    while reader.tier._opened.transport("default").available(False):
        i += 1
        assert i < 10, "the breaker does not open"
        more = names(4, f"more{i}")
        assert reader.hit(reader.request(chunks=more), more) == 0
    began = time.monotonic()
    assert reader.hit(reader.request(chunks=names(4, "other")), names(4, "other")) == 0
    assert time.monotonic() - began < 0.1, "an open breaker answers at once"


def test_a_load_ends_at_the_deadline_of_its_own_decision(
    make, proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The policy's 3 s against the 60 s of the configuration: what came by then is used, the rest is a miss.

    Control: a load of which the policy says nothing waits on, and comes whole when the store answers again.
    """
    monkeypatch.setattr(hooks, "_current", hooks.current())
    cost: Any = hooks.install(policy(hardware(), tmp_path / "status"))
    assert isinstance(cost, CostPolicy)
    mine, others = names(4, "mine"), names(2, "others")
    stored(make(), mine + others)
    reader = make(load_deadline_s=60.0, lookup_deadline_s=20.0, breaker_errors=99)
    for chunk in (mine[2], *others):
        proxy.fault("hold", methods=("GET",), match=key(chunk)[:-4].hex())
    patient = reader.request(chunks=others)
    while not reader.tier.loading_bytes:  # its chunks are there by HEAD, and asked for
        assert reader.scan(patient, others) is None
        reader.step()
        time.sleep(0.001)
    request = reader.request(chunks=mine)
    cost.deadlines[request.req_id] = 3.0
    began = time.monotonic()
    assert reader.hit(request, mine, timeout=50.0) == 2
    took = time.monotonic() - began
    assert 3.0 <= took < 30, f"{took:.1f} s"
    assert reader.rows(request, mine[:2]) == [data(c) for c in mine[:2]]
    assert reader.reasons().get("load_late") == 1 and cost.policy.ledger.missed_deadlines == 1
    assert reader.scan(patient, others) is None, "control: it waits on"
    proxy.heal()
    assert reader.hit(patient, others, timeout=50.0) == 2
