"""What could have been done, knowing everything: true rates, every request's luck and all later arrivals.

Shares no code with the cost model. Hindsight search: from each of some simple plans, change one request's cut at a time
and keep what lowers the mean over the measured requests; from the best of what that gives, those of two neighbours
together; passes until nothing does. The result is a plan that was possible, so it bounds the regret from one side: a better
plan may exist. With five requests it is within 1 % of the best of all plans (tests/promises/test_p4_virtual_clock.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from bench.sim.world import Act, Engine, Job, Store, View, run

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def mean_after(seconds: Sequence[float], skip: int) -> float:
    measured = seconds[skip:]
    return sum(measured) / len(measured)


def fixed_plan(engine: Engine, stores: Callable[[int], Store], jobs: Sequence[Job], plan: Sequence[int]) -> list[float]:
    return run(engine, stores, jobs, lambda v: Act(plan[v.number]))


def greedy_plan(engine: Engine, stores: Callable[[int], Store], jobs: Sequence[Job]) -> list[int]:
    """Each request takes the cut that serves it first, by the true rates and its own luck."""
    plan = [0] * len(jobs)
    link_free = 0.0

    def decide(v: View) -> Act:
        nonlocal link_free
        job, store = v.job, stores(v.number)
        wait = sum(engine.rest(start, start + tokens) for tokens, start in v.waiting)
        best = (float("inf"), 0, 0.0)
        for share in SHARES:
            cut = int(job.held * share) // 128 * 128
            busy = store.transfer(cut * engine.bytes_per_token) * job.store_luck if cut else 0.0
            load = max(v.now, link_free) - v.now + busy + store.latency_s * job.latency_luck if cut else 0.0
            total = max(wait, load) + engine.rest(cut, job.tokens) * job.engine_luck
            best = min(best, (total, cut, busy))
        plan[v.number] = best[1]
        if best[1]:
            link_free = max(v.now, link_free) + best[2]
        return Act(best[1])

    run(engine, stores, jobs, decide)
    return plan


def hindsight(
    engine: Engine, stores: Callable[[int], Store], jobs: Sequence[Job], skip: int, passes: int = 4
) -> tuple[float, list[int]]:
    """Mean seconds after the first `skip` requests under the best plan found, and the plan."""
    starts = [[int(j.held * s) // 128 * 128 for j in jobs] for s in SHARES]
    starts.append(greedy_plan(engine, stores, jobs))

    def mean(plan: Sequence[int]) -> float:
        return mean_after(fixed_plan(engine, stores, jobs, plan), skip)

    _, plan = min((_climb(plan, jobs, mean, passes, (1,)) for plan in starts), key=lambda found: found[0])
    return _climb(plan, jobs, mean, passes, (1, 2))


def _climb(
    plan: Sequence[int],
    jobs: Sequence[Job],
    mean: Callable[[Sequence[int]], float],
    passes: int,
    widths: Sequence[int],
) -> tuple[float, list[int]]:
    """The cuts of so many requests in a row changed together, while that lowers the mean."""
    plan = list(plan)
    best = mean(plan)
    cuts = [[int(job.held * share) // 128 * 128 for share in SHARES] for job in jobs]
    for _ in range(passes):
        before = best
        for width in widths:
            for i in range(len(jobs) - width + 1):
                kept = plan[i : i + width]
                for tried in product(*cuts[i : i + width]):
                    plan[i : i + width] = tried
                    if (now := mean(plan)) < best * (1 - 1e-9):
                        best, kept = now, list(tried)
                plan[i : i + width] = kept
        if best == before:
            break
    return best, plan
