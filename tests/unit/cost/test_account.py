"""Predicted, actual and regret reach vLLM's statistics, and from there Prometheus."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from bench.sim import grid
from components.common.cost.decide import Held, Request
from components.common.kv import hooks, metrics


def test_the_account_of_the_cost_model_is_in_the_tiers_metrics() -> None:
    config = grid.config("h200-8b")
    hooks.install({
        "module": "components.common.kv.policy", "class": "CostPolicy", "hardware": config.hardware.model_dump(),
        "tiers": [t.model_dump() for t in config.tiers],
    })  # fmt: skip
    try:
        policy = hooks.current().policy
        for slower in (1.0, 3.0):
            decision = policy.decide(Request(65_536, held=(Held("blob", 65_536),)))
            policy.finished(decision, slower * max(decision.chosen.total_s, decision.other_s))
        account = hooks.account()
        assert account["cost_requests_total"] == 2 and account["cost_regret_seconds_total"] > 0
        assert account["cost_actual_seconds_total"] > account["cost_predicted_seconds_total"] > 0
        stats = metrics.Recorder("1:blob").take(
            Counter(), Counter(), SimpleNamespace(queued_loads=0, queued_stores=0), account
        )  # type: ignore[arg-type]
        text = str(stats.data)
        for name in account:
            if account[name]:
                assert metrics.P + name in text, name
        assert set(account) <= set(metrics._COUNTERS)
        assert all(metrics.P + name in metrics.definitions() for name in account)
    finally:
        hooks.install({})
    assert hooks.account() == {}, "without a policy there is nothing to account for"
