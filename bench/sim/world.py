"""The truth of the simulator: one engine, one store, requests, noise. Virtual clock, discrete events.

Engine: one prefill at a time, by order of arrival among those ready (vLLM: first come first served, chunked prefill);
        seconds come from a table of measured points, interpolated, not from any model's formula.
Store:  bytes pass one link in order of asking at the store's rate; latency passes beside it. The rate is bounded by the
        account's egress (what other workers take is gone), the node's network card and requests per second.
Noise:  lognormal, drawn per request before the run, so that every strategy meets the same luck.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

GBIT = 125_000_000.0


class Engine(NamedTuple):
    """Prefill truth: `tokens[i]` take `seconds[i]`; one step costs at least `step_s`."""

    name: str
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    bytes_per_token: int
    step_s: float = 0.005
    jitter: float = 0.03

    def whole(self, n: float) -> float:
        """Seconds of a prompt of n tokens, nothing cached."""
        if n <= 0:
            return 0.0
        xs, ys = (0, *self.tokens), (0.0, *self.seconds)
        i = min(bisect_right(xs, n), len(xs) - 1)
        if i == 1:  # below the first point: a step's constant, then linear
            return min(self.step_s, ys[1]) + (ys[1] - min(self.step_s, ys[1])) * n / xs[1]
        # per-token seconds are close to linear in n (attention): interpolate those, and continue them past the end
        a, b = ys[i - 1] / xs[i - 1], ys[i] / xs[i]
        return n * (a + (b - a) * (n - xs[i - 1]) / (xs[i] - xs[i - 1]))

    def rest(self, start: int, n: int) -> float:
        """Seconds to compute [start, n) with `start` tokens cached."""
        return max(self.whole(n) - self.whole(start), min(self.step_s, self.whole(n)))


class Store(NamedTuple):
    """A store as one worker meets it."""

    bytes_per_s: float
    latency_s: float = 0.080
    jitter: float = 0.10
    latency_jitter: float = 0.25
    object_bytes: int = 16 << 20
    nic_bytes_per_s: float = 80 * GBIT
    account_egress_bytes_per_s: float = 200 * GBIT
    account_requests_per_s: float = 20_000.0
    others_bytes_per_s: float = 0.0
    """Egress of the account that other workers take."""

    def transfer(self, nbytes: float) -> float:
        """Seconds the link is busy with `nbytes`."""
        free = max(self.account_egress_bytes_per_s - self.others_bytes_per_s, 0.02 * self.account_egress_bytes_per_s)
        rate = min(self.bytes_per_s, self.nic_bytes_per_s, free)
        return max(nbytes / rate, math.ceil(nbytes / self.object_bytes) / self.account_requests_per_s)


class Job(NamedTuple):
    """One request of the workload. `held` tokens lie in the store; factors are its luck."""

    arrival: float
    tokens: int
    held: int
    engine_luck: float
    store_luck: float
    latency_luck: float


class View(NamedTuple):
    """What a worker can see when a request arrives."""

    now: float
    number: int
    job: Job
    waiting: tuple[tuple[int, int], ...]
    """(tokens still to compute, cached before them) of prompts ready and before this one; the running one first."""
    queued_bytes: int


class Act(NamedTuple):
    """What to do: load `cut` tokens (give up after `deadline` seconds), recompute the rest; `probe` bytes in the background."""

    cut: int
    deadline: float = math.inf
    probe: int = 0


class Fetched(NamedTuple):
    number: int
    nbytes: int
    seconds: float
    queued: int
    arrived: int
    probe: bool


class Computed(NamedTuple):
    number: int
    start: int
    tokens: int
    seconds: float


Decide = Callable[[View], Act]


class Listener:
    """Told what happened, when it happened. The base class ignores it."""

    def fetched(self, event: Fetched) -> None: ...
    def computed(self, event: Computed) -> None: ...
    def served(self, index: int, seconds: float) -> None: ...


def workload(engine: Engine, tokens: Sequence[int], load: float, seed: int, store: Store) -> list[Job]:
    """Poisson arrivals such that an engine that recomputes everything is busy `load` of the time.

    All of each prompt but its last token is held by the store, in whole 128-token chunks.
    """
    rng = random.Random(seed)
    mean = sum(engine.whole(n) for n in tokens) / len(tokens)
    now, jobs = 0.0, []
    for n in tokens:
        now += rng.expovariate(load / mean)
        lucks = [math.exp(rng.gauss(-s * s / 2, s)) for s in (engine.jitter, store.jitter, store.latency_jitter)]
        jobs.append(Job(now, n, n // 128 * 128, *lucks))
    return jobs


def run(
    engine: Engine,
    stores: Callable[[int], Store],
    jobs: Sequence[Job],
    decide: Decide,
    listener: Listener | None = None,
) -> list[float]:
    """Serves `jobs`; returns each one's seconds from arrival to first token. `stores(i)` = the store when job i asks."""
    tell = listener or Listener()
    done = [0.0] * len(jobs)
    order = 0
    events: list[tuple[float, int, str, int, object]] = []
    ready: list[tuple[int, int]] = []  # (index, start)
    running: tuple[int, int, float, float] | None = None  # index, start, began, seconds
    link_free = 0.0
    on_link: list[tuple[float, float, int]] = []  # begins, ends, bytes; in order

    def push(at: float, kind: str, index: int, what: object = None) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (at, order, kind, index, what))

    def left_on_link(now: float) -> int:
        """Bytes asked for and not passed; a worker sees this from its chunks' completions."""
        while on_link and on_link[0][1] <= now:
            on_link.pop(0)
        return sum(int(n * min(1.0, (ends - now) / max(ends - begins, 1e-12))) for begins, ends, n in on_link)

    def ask(now: float, index: int, nbytes: int) -> tuple[float, float, int]:
        """Puts a transfer on the link: when its first byte passes, when it is complete, bytes before it."""
        nonlocal link_free
        store, job = stores(index), jobs[index]
        queued = left_on_link(now)
        starts = max(now, link_free)
        link_free = starts + store.transfer(nbytes) * job.store_luck
        on_link.append((starts, link_free, nbytes))
        return starts, link_free + store.latency_s * job.latency_luck, queued

    def start_next(now: float) -> None:
        nonlocal running
        if running is None and ready:
            index, start = heapq.heappop(ready)
            seconds = engine.rest(start, jobs[index].tokens) * jobs[index].engine_luck
            running = (index, start, now, seconds)
            push(now + seconds, "computed", index)

    def view(now: float, index: int) -> View:
        waiting = [(jobs[i].tokens - s, s) for i, s in sorted(ready) if i < index]
        if running is not None:
            i, s, began, seconds = running
            left = max(0.0, 1 - (now - began) / seconds)
            rest = max(1, round((jobs[i].tokens - s) * left))
            waiting.insert(0, (rest, jobs[i].tokens - rest))
        return View(now, index, jobs[index], tuple(waiting), left_on_link(now))

    for i, job in enumerate(jobs):
        push(job.arrival, "arrival", i)
    while events:
        now, _, kind, index, what = heapq.heappop(events)
        job = jobs[index]
        if kind == "arrival":
            act = decide(view(now, index))
            cut = max(0, min(act.cut, job.held))
            if cut:
                nbytes = cut * engine.bytes_per_token
                begins, ends, queued = ask(now, index, nbytes)
                event = Fetched(index, nbytes, ends - now, queued, nbytes, False)
                if ends - now <= act.deadline:
                    push(ends, "loaded", index, (event, cut))
                else:  # what passed the link until the deadline is there, in order; the link drops the rest
                    gave_up = now + act.deadline
                    passed = max(
                        0.0, min(1.0, (gave_up - begins - (ends - link_free)) / max(link_free - begins, 1e-12))
                    )
                    link_free = max(min(link_free, gave_up), begins)
                    on_link[-1] = (begins, link_free, int(nbytes * passed))
                    part = int(cut * passed) // 128 * 128
                    push(
                        gave_up,
                        "loaded",
                        index,
                        (event._replace(seconds=act.deadline, arrived=part * engine.bytes_per_token), part),
                    )
            else:
                heapq.heappush(ready, (index, 0))
            if act.probe:
                _, ends, queued = ask(now, index, act.probe)
                push(ends, "probed", index, (Fetched(index, act.probe, ends - now, queued, act.probe, True), 0))
        elif kind in ("loaded", "probed"):
            event, part = what
            tell.fetched(event)
            if kind == "loaded":
                heapq.heappush(ready, (index, part))
        else:
            assert running is not None
            i, start, _, seconds = running
            running = None
            tell.computed(Computed(i, start, job.tokens - start, seconds))
            done[i] = now - jobs[i].arrival
            tell.served(i, done[i])
        start_next(now)
    return done
