"""Load or recompute for one engine: estimates, decisions that do not oscillate, bounded exploration, the account of both.

Pure: the caller says what it saw and gets decisions; there is no clock and no I/O. One thread owns it.

    decision = policy.decide(request)      at arrival, or when the scheduler asks
    policy.fetched(...), policy.computed(...)   as loads and prefills complete
    policy.finished(decision, seconds)     first token out
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from components.common.cost.config import CostConfig
from components.common.cost.decide import Held, Option, Request, Tiers, best, options, split
from components.common.cost.fetch import Fetch
from components.common.cost.ledger import Ledger, Outcome
from components.common.cost.prefill import Prefill
from components.common.cost.traffic import Traffic

_COMPUTE_EVERY = 18
"""Requests that may pass without a measurement of prefill while all is loaded: then the end of a prompt is computed, as
soon as that costs no more than the probing budget brought in since the last."""
_COMPUTE_FIRST = 3
"""Measurements of prefill until the profile counts as tried: two in a row make a change of speed known."""
_TAIL_SHARE = 0.1
"""Predicted prefill of such an end, as a share of the load's time: the larger, the more it says of the whole."""
_TAIL_TOKENS = 64
"""Least of such an end: the engine's adapter takes shorter steps for noise."""
_TAILS_FREE = 8
"""Ends tried whatever they cost while prefill was never measured."""
_TAIL_REASON = "exploring: the end is computed, prefill was not measured"
_SIZES = 40
_UNSETTLED = 3
"""Times the probing budget while a change of speed is being followed."""

_PROBE_LATENCIES = 2
"""Transfer time of a probe in latencies, so that it sees the rate."""
_OTHER_PROBES, _OTHER_SIZE = 2, 4
"""Every so manyth probe has so many times the size (a quarter, where that would be too much): probes of one size cannot tell
latency from rate, and a fit that takes the one for the other sizes its probes so small that it never finds out."""

_FORGOTTEN = 100
"""Loads declined in a row after which a tier that others promote into, if believed slower, is believed its prior again: it
cannot be probed, and one estimate far too slow would keep all from loading for ever."""

_SCOUT_EVERY = 12
"""Requests after which a declined tier is looked at with one chunk a lane though the budget is spent: behind a slow store
that costs more than the budget brings in, and that it has become fast would never be seen."""
_SCOUT_SHARE = 0.5
"""Of the seconds served since the last probe: most that such a look may take. Nobody waits for it."""
_LARGE_SHARE = 0.25
"""The same of a larger one, which tells latency from rate while a change of speed is being followed."""


class Probe(NamedTuple):
    """Read `tokens` of the prompt from `tier` in the background: nobody waits for it, it only measures."""

    tier: str
    tokens: int


class Decision(NamedTuple):
    """What to do with one request. All seconds are predictions, from now to the first token."""

    load_tokens: int
    """Tokens to load beyond the local hit; 0 = recompute."""
    chosen: Option
    compute: Option
    """Recompute everything."""
    deadline_s: float
    """Seconds after which a load is given up and the rest recomputed; inf when nothing is loaded."""
    reason: str
    other_s: float
    explored_s: float = 0.0
    overlap_from: int | None = None
    """Compute up to this token while the chunks from here on load; None = one way only."""
    overlap_s: float = math.inf
    probe: Probe | None = None
    other_beyond: tuple[str, ...] = ()
    """What was extrapolated for the best load, chosen or not."""

    @property
    def beyond(self) -> tuple[str, ...]:
        """What was extrapolated to get here, in words; empty when everything was within what has been measured."""
        return tuple(dict.fromkeys(self.chosen.beyond + self.compute.beyond + self.other_beyond))

    def attributes(self) -> dict[str, Any]:
        """For traces: flat, JSON types."""
        return {
            "kv.cost.load_tokens": self.load_tokens,
            "kv.cost.reason": self.reason,
            "kv.cost.predicted_s": min(self.chosen.total_s, self.overlap_s),
            "kv.cost.predicted_load_s": self.chosen.load.mean,
            "kv.cost.predicted_load_sd_s": self.chosen.load.sd,
            "kv.cost.recompute_s": self.compute.total_s,
            "kv.cost.explored_s": self.explored_s,
            "kv.cost.extrapolated": "; ".join(self.beyond),
        }


class Policy:
    """The cost model of one engine and what it has learned."""

    def __init__(self, config: CostConfig, step_tokens: int = 0) -> None:
        self.config = config
        self.prefill = Prefill(config.hardware, step_tokens)
        self.fetches = {t.name: Fetch(t) for t in config.tiers}
        self.tiers = Tiers(self.fetches, config.hardware.kv_bytes_per_token)
        self.ledger = Ledger()
        self.traffic = Traffic()
        self._loads: dict[tuple[int, str], bool] = {}
        self._tails = self._declined = 0
        self._served_at_probe_s = self._served_at_tail_s = 0.0

    def decide(self, request: Request) -> Decision:
        """The plan for `request`. Tiers without an estimate in this policy are not used."""
        known = self._known_part(request)
        found = request.wait_s > 0 or bool(request.loading) if request.found is None else request.found
        self.traffic.arrived(request.at, found)
        choices = options(known, self.prefill, self.tiers, self.config.chunk_tokens, self.traffic)
        compute = choices[0]
        loads = choices[1:]
        for fetch in self.fetches.values():
            fetch.tick()
        self.prefill.tick()
        if not loads:
            self.traffic.decided(compute.total_s)
            return Decision(0, compute, compute, math.inf, "nothing held", math.inf)
        key = (min((known.tokens - known.local).bit_length(), _SIZES), known.held[-1].tier)
        load = best(loads)
        chosen, reason = self._choose(key, load, compute)
        explored = 0.0
        if chosen is load and self.config.mode == "auto" and (tail := self._tail(known, load)):
            chosen, reason = tail, _TAIL_REASON
            explored = max(tail.price_s - load.price_s, 0.0)
            self.ledger.explored_s += explored
        if chosen.beyond or compute.beyond or load.beyond:
            self.ledger.beyond += 1
        loaded = chosen.cut > known.local
        decision = Decision(
            chosen.cut - known.local,
            chosen,
            compute,
            self._deadline(chosen, compute) if loaded else math.inf,
            reason,
            compute.total_s if loaded else load.total_s,
            explored,
            other_beyond=load.beyond,
        )
        if self.config.mode == "auto":
            decision = self._overlap(known, load, decision)
        share = decision.load_tokens / max(loads[-1].cut - known.local, 1)
        self.traffic.decided(min(chosen.total_s, decision.overlap_s), share)
        self._declined = 0 if decision.load_tokens else self._declined + 1
        if self._declined >= _FORGOTTEN:
            self._forget_the_slow()
        if self.config.mode == "auto" and known.certain:
            decision = decision._replace(probe=self._probe(known, decision))
        return decision

    def instead(self, decision: Decision, reason: str) -> Decision:
        """Recompute all, for a reason that the caller knows; what was given away to explore is not given away then."""
        self.ledger.explored_s -= decision.explored_s
        self._tails -= decision.reason == _TAIL_REASON
        self.traffic.undone(decision.compute.total_s)
        return decision._replace(
            load_tokens=0, chosen=decision.compute, deadline_s=math.inf, reason=reason, other_s=decision.chosen.total_s,
            explored_s=0.0, overlap_from=None, overlap_s=math.inf,
        )  # fmt: skip

    def fetched(self, tier: str, nbytes: int, seconds: float, queued: int = 0, arrived: int | None = None) -> None:
        """A load of `nbytes` ended after `seconds`. `arrived`: bytes that were there when it was given up; None = all."""
        fetch = self.fetches.get(tier)
        if fetch is None:
            return
        if arrived is None or arrived >= nbytes:
            fetch.observe(nbytes, seconds, queued)
        else:
            self.ledger.missed_deadlines += 1
            fetch.gave_up(nbytes, arrived, seconds, queued)

    def computed(self, tokens: int, context: int, seconds: float, decoding: int = 0) -> None:
        """The engine spent `seconds` on `tokens` new prompt tokens after `context` cached ones."""
        self.prefill.observe(tokens, context, seconds, decoding)

    def finished(self, decision: Decision, seconds: float) -> Outcome:
        """First token out `seconds` after the decision."""
        predicted = min(decision.chosen.total_s, decision.overlap_s)
        outcome = Outcome(decision.load_tokens > 0, predicted, decision.other_s, seconds, decision.explored_s)
        self.ledger.add(outcome)
        return outcome

    def explain(self) -> dict[str, Any]:
        """What is believed now and how it has gone, for `dynamo status --explain`."""
        tiers = {
            name: {
                "fixed_s": f.fixed_s,
                "bytes_per_s": f.bytes_per_s,
                "measured": f.observed,
                "requests_since": f.age,
                "speed_changes": f.changes,
            }
            for name, f in self.fetches.items()
        }
        lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 122880)
        per = self.config.hardware.kv_bytes_per_token
        table = [
            {
                "tokens": n,
                "recompute_s": self.prefill.seconds(n),
                "extrapolated": self.prefill.predict(n).beyond,
                **{f"{t}_s": self.tiers.load(Request(n, held=(Held(t, n),)), n).mean for t in self.fetches},
            }
            for n in lengths
        ]
        return {
            "mode": self.config.mode,
            "bytes_per_token": per,
            "tiers": tiers,
            "prefill_measured": self.prefill.observed,
            "table": table,
            **self.ledger.report(),
        }

    def _known_part(self, request: Request) -> Request:
        held = []
        for span in request.held:
            if span.tier not in self.fetches:
                break
            held.append(span)
        return request._replace(held=tuple(held))

    def _forget_the_slow(self) -> None:
        """Tiers that others promote into and that are believed slower than their priors are believed these again."""
        self._declined = 0
        for name, fetch in list(self.fetches.items()):
            fresh, nbytes = Fetch(fetch.prior), self.config.chunk_tokens * self.config.hardware.kv_bytes_per_token
            if self._passed(name) and fetch.seconds(nbytes) > fresh.seconds(nbytes):
                self.fetches[name] = self.tiers.fetches[name] = fresh

    def _may_look(self, fetch: Fetch, tokens: int) -> bool:
        """Within the probing budget; or now and then, a share of what was served since the last look."""
        seconds = fetch.look_s(tokens * self.config.hardware.kv_bytes_per_token)
        budget = self.config.probe_budget * (_UNSETTLED if fetch.unsettled else 1)
        if not fetch.observed or self.ledger.may_probe(seconds, budget, 4 * seconds):
            return True
        lately = self.ledger.served_s - self._served_at_probe_s
        if tokens <= fetch.prior.lanes * self.config.chunk_tokens:
            return (fetch.unsettled or fetch.age >= _SCOUT_EVERY) and seconds <= _SCOUT_SHARE * lately
        return fetch.unsettled and seconds <= _LARGE_SHARE * lately

    def _passed(self, tier: str) -> bool:
        """Whether others promote into it."""
        return any(f.prior.via == tier for f in self.fetches.values())

    def _choose(self, key: tuple[int, str], load: Option, compute: Option) -> tuple[Option, str]:
        if self.config.mode != "auto":
            fixed = load if self.config.mode == "load" else compute
            return fixed, f"mode {self.config.mode}"
        before = self._loads.get(key)
        better, worse = (load, compute) if load.price_s < compute.price_s else (compute, load)
        wants = better is load
        if before is not None and wants != before and worse.price_s <= better.price_s * (1 + self.config.switch_gain):
            return worse, "kept: the difference is below switch_gain"
        if before is not None and wants != before:
            self.ledger.switches += 1
        self._loads[key] = wants
        return better, "load is faster" if wants else "recompute is faster"

    def _tail(self, request: Request, load: Option) -> Option | None:
        """Load less and compute the end: who always loads never learns that the engine is faster than its profile says.

        The end's time follows from prefill alone, and if the profile is right it costs a tenth of the load's.
        """
        chunk, prefill = self.config.chunk_tokens, self.prefill
        early = prefill.observed < _COMPUTE_FIRST or prefill.doubted
        if not (early or prefill.age >= _COMPUTE_EVERY) or request.tokens - load.cut >= chunk:
            return None  # it is measured anyway
        end, cut = request.tokens, load.cut - -(-_TAIL_TOKENS // chunk) * chunk
        while (
            cut - chunk > request.local
            and prefill.seconds(end - cut + chunk, cut - chunk) <= _TAIL_SHARE * load.total_s
        ):
            cut -= chunk
        if cut <= request.local:
            return None
        [tail] = options(request, prefill, self.tiers, chunk, self.traffic, (cut,))
        excess = max(tail.price_s - load.price_s, 0.0)
        free = not prefill.observed and self._tails < _TAILS_FREE
        if excess > load.total_s or not (free or self.ledger.may_explore(excess, self.config.probe_budget, 4 * excess)):
            return None
        lately = self.ledger.served_s - self._served_at_tail_s
        if not early and excess > self.config.probe_budget * lately:
            return None
        self._tails += 1
        self._served_at_tail_s = self.ledger.served_s
        return tail

    def _deadline(self, chosen: Option, compute: Option) -> float:
        """Twice the prediction, four deviations, or half of what recomputing would have cost: the largest of them."""
        load = chosen.load
        return max(
            load.mean * self.config.deadline_factor,
            load.mean + 4 * load.sd if not load.beyond else 0.0,
            compute.compute.mean / 2,
            self.config.deadline_floor_s,
        )

    def _overlap(self, request: Request, load: Option, decision: Decision) -> Decision:
        config = self.config
        if not config.overlap or request.tokens - request.local < config.overlap_min_tokens:
            return decision
        if request.loading:  # they come back in the midst of it; `split` prices an engine of its own
            return decision
        c, fetch = decision.compute.compute.mean, load.load.mean
        if not c or not fetch or not 0.5 <= c / fetch <= 2.0 or decision.explored_s:
            return decision
        at, seconds = split(request, self.prefill, self.tiers, config.chunk_tokens, load.cut)
        seconds += self.prefill.seconds(config.overlap_step_tokens, at)  # they meet when a step ends, not between
        single = min(load.total_s, decision.compute.total_s)
        if seconds > single * (1 - config.overlap_min_gain) or not request.local < at < load.cut:
            return decision
        return decision._replace(
            load_tokens=load.cut - request.local,
            chosen=load,
            overlap_from=at,
            overlap_s=seconds,
            other_s=single,
            deadline_s=math.inf,
            reason="both ends at once",
        )

    def _probe(self, request: Request, decision: Decision) -> Probe | None:
        """A background read from a tier that was held but not used for a while, if a faster tier would change anything."""
        used = decision.chosen.cut
        start = request.local
        cap = request.tokens if request.max_load_tokens is None else request.local + request.max_load_tokens
        for tier, held in request.held:
            first, start = start, max(start, held)
            end = min(held, cap)
            fetch = self.fetches[tier]
            due = fetch.observed == 0 or fetch.age >= self.config.probe_every or (fetch.unsettled and fetch.age > 1)
            if used > first or not due or request.queued.get(tier, 0):
                continue  # a load measures it; and one at a time: a store that does not answer gets no heap of probes
            if self._passed(tier):
                continue  # what others promote into is not read by a promotion
            if first >= used and first > request.local and not fetch.prior.via:
                continue
            # A tier that was slow of late may have none of the latency left that it seemed to have.
            latency = min(fetch.fixed_s, 4 * fetch.prior.fixed_s)
            if decision.compute.total_s <= request.wait_s + self.prefill.seconds(1) + latency / 4:
                continue  # not even a tier ten times as fast would win
            chunk, per = self.config.chunk_tokens, self.config.hardware.kv_bytes_per_token
            most = min(self.config.probe_bytes // per, end - first) // chunk * chunk
            sized = int(_PROBE_LATENCIES * fetch.fixed_s * fetch.bytes_per_s) // per // chunk * chunk
            tokens = min(max(chunk, fetch.prior.lanes * chunk, sized), max(most, chunk))
            if tokens > end - first:
                continue
            other = min(_OTHER_SIZE * tokens, most)
            if other <= tokens and not fetch.unsettled:  # a smaller one says nothing of a new rate
                narrow = tokens // _OTHER_SIZE // chunk * chunk
                other = narrow if narrow >= fetch.prior.lanes * chunk else tokens
            sizes = (other, tokens) if self.ledger.probes % _OTHER_PROBES else (tokens,)
            tokens = next((n for n in sizes if self._may_look(fetch, n)), 0)
            if not tokens:
                continue
            seconds = fetch.look_s(tokens * per)
            self._served_at_probe_s = self.ledger.served_s
            self.ledger.probe(seconds, tokens * per)
            return Probe(tier, tokens)
        return None
