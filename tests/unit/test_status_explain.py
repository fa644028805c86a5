"""`dynamo status --explain` and the plan behind it: predicted, actual and regret of each worker's cost model."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from components.common.cost.config import CostConfig
from components.common.cost.decide import Held, Request
from components.common.cost.policy import Policy
from components.common.kv.config import KvTiersConfig
from graphs.cli._explain import explained, explanations
from graphs.compile import compile_plan
from graphs.load import read_graph
from graphs.plan import Plan
from graphs.site import Site

ROOT = Path(__file__).resolve().parents[2]


def plan(run: Path, *sets: str) -> Plan:
    graph = read_graph(ROOT / "graphs/disagg.yaml", ("kv.profile=smollm2-135m-cpu", *sets))
    return compile_plan(graph, Site(run=run, state=run, python="python3"))


def settings(p: Plan, name: str) -> KvTiersConfig:
    process = next(x for x in p.processes if x.name == name)
    return KvTiersConfig.parse((process.config or {})["kv"]["settings"], where="plan")


def text(found: object) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(found)
    return console.export_text()


def test_a_graph_with_tiers_plans_the_cost_model_and_switches_it_off(tmp_path: Path) -> None:
    policy = dict(settings(plan(tmp_path), "prefill-0").policy)
    assert policy.pop("status_file") == str(tmp_path / "reports/prefill-0.cost.json")
    assert (policy.pop("module"), policy.pop("class")) == ("components.common.kv.policy", "CostPolicy")
    config = CostConfig.parse(policy, where="policy")
    assert config.hardware.name == "cpu-smollm2" and [t.name for t in config.tiers] == ["dram", "blob"]
    assert config.tiers[1].via == "dram"
    off = plan(tmp_path, "kv.set.policy={}")
    assert settings(off, "prefill-0").policy == {}
    assert "everything that is held is loaded" in explanations(off)["prefill-0"]["why"]


def test_what_a_worker_wrote_is_shown(tmp_path: Path) -> None:
    p = plan(tmp_path)
    assert explanations(p)["prefill-0"] == {"why": "no request has been decided yet"}
    raw = dict(settings(p, "prefill-0").policy)
    path = Path(raw.pop("status_file"))
    policy = Policy(CostConfig.parse({k: v for k, v in raw.items() if k not in ("module", "class")}, where=""))
    for _ in range(3):
        decision = policy.decide(Request(2048, held=(Held("blob", 2048),)))
        policy.fetched("blob", 2048 * 46_080, 0.5)
        policy.finished(decision, 2 * decision.compute.total_s)
    path.parent.mkdir()
    path.write_text(json.dumps(policy.explain()))
    found = explanations(p)["prefill-0"]
    assert found["requests"] == 3 and found["regret_s"] > 0 and found["served_s"] > found["predicted_s"]
    shown = text(explained("prefill-0", found))
    assert "3 requests, 3 loaded" in shown and f"regret     {found['regret_s']:.2f} s" in shown
    assert "(3 measured)" in shown and "122880" in shown and "blob" in shown
    path.write_text("{")
    assert "JSONDecodeError" in explanations(p)["prefill-0"]["why"]
