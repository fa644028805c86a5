"""Runs a strategy in a world: the cost model itself (`auto`), always load, never load, a fixed threshold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.sim.world import Act, Computed, Engine, Fetched, Job, Listener, Store, View, run
from components.common.cost.config import CostConfig
from components.common.cost.decide import Held, Loading, Request
from components.common.cost.policy import Decision, Policy


class Auto(Listener):
    """The product's policy, fed with what a worker can see and nothing else."""

    def __init__(self, config: CostConfig) -> None:
        self.policy = Policy(config)
        self.decisions: dict[int, Decision] = {}
        self.loading: dict[int, Loading] = {}

    def __call__(self, view: View) -> Act:
        per = self.policy.config.hardware.kv_bytes_per_token
        wait = sum(self.policy.prefill.seconds(tokens, start) for tokens, start in view.waiting)
        loading = tuple(Loading(max(at - view.now, 0.0), s) for at, s in self.loading.values())
        request = Request(
            view.job.tokens,
            0,
            (Held("blob", view.job.held),),
            wait,
            queued={"blob": view.queued_bytes},
            at=view.now,
            loading=loading,
        )
        decision = self.policy.decide(request)
        self.decisions[view.number] = decision
        if decision.load_tokens:
            chosen = decision.chosen
            self.loading[view.number] = Loading(view.now + chosen.load.mean, chosen.compute.mean)
        probe = decision.probe.tokens * per if decision.probe else 0
        return Act(decision.load_tokens, decision.deadline_s, probe)

    def fetched(self, event: Fetched) -> None:
        if not event.probe:
            self.loading.pop(event.number, None)
        self.policy.fetched("blob", event.nbytes, event.seconds, event.queued, event.arrived)

    def computed(self, event: Computed) -> None:
        self.policy.computed(event.tokens, event.start, event.seconds)

    def served(self, index: int, seconds: float) -> None:
        self.policy.finished(self.decisions[index], seconds)


def always_load(view: View) -> Act:
    return Act(view.job.held)


def never_load(view: View) -> Act:
    return Act(0)


def threshold(tokens: int) -> Callable[[View], Act]:
    """Load from `tokens` up: what released systems do."""
    return lambda view: Act(view.job.held if view.job.tokens >= tokens else 0)


def auto(
    engine: Engine, stores: Callable[[int], Store], jobs: Sequence[Job], config: CostConfig
) -> tuple[list[float], Auto]:
    strategy = Auto(config)
    return run(engine, stores, jobs, strategy, strategy), strategy
