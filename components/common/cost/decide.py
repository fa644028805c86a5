"""The decision for one request, as a pure function of two estimates: how many tokens to load, the rest to recompute.

    total(k) = max(wait for the engine, load of [local, k)) + prefill of [k, n)

`k` may lie anywhere in what the tiers hold. Prefill grows faster than its tokens, so with one tier and an idle engine
the best k is one of the ends; a queue before the engine, a second tier or a cap moves it inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from components.common.cost.estimate import Estimate
from components.common.cost.fetch import Fetch
from components.common.cost.prefill import Prefill
from components.common.cost.traffic import Traffic

_INTERIOR = 4
"""Cuts tried inside each tier's span beside its ends."""


class Held(NamedTuple):
    """`tier` holds the prompt's KV from where the span before it (or the local hit) ends up to token `end`."""

    tier: str
    end: int


class Request(NamedTuple):
    """What is known of a request when it must be decided. Tokens count from the prompt's start."""

    tokens: int
    local: int = 0
    """Tokens already in HBM."""
    held: tuple[Held, ...] = ()
    """What tiers hold beyond `local`, nearest first, without gaps."""
    wait_s: float = 0.0
    """Predicted seconds until the engine could start on it (prefill queued before)."""
    decoding: int = 0
    """Sequences decoding beside it."""
    queued: Mapping[str, int] = {}
    """Bytes asked of each tier before and not yet there."""
    max_load_tokens: int | None = None
    """Cap on tokens loaded beyond `local` (the router's plan)."""
    at: float | None = None
    """Seconds of the caller's clock at arrival; None = unknown, what this request costs others is not priced."""


class Option(NamedTuple):
    """One way to serve: load [local, cut), compute the rest. Seconds from now to the first token."""

    cut: int
    load: Estimate
    compute: Estimate
    total_s: float
    others_s: float = 0.0
    """Seconds it is expected to cost the requests after it."""

    @property
    def price_s(self) -> float:
        """What is minimised."""
        return self.total_s + self.others_s

    @property
    def beyond(self) -> tuple[str, ...]:
        return tuple(b for b in (self.load.beyond, self.compute.beyond) if b)


class Tiers:
    """Fetch estimates by tier name. `via`: every byte of that tier also passes the other (blob through dram)."""

    def __init__(self, fetches: Mapping[str, Fetch], bytes_per_token: int) -> None:
        self.fetches, self.bytes_per_token = dict(fetches), bytes_per_token

    def _spans(self, request: Request, cut: int) -> dict[str, int]:
        """Bytes of [local, cut) by the tier they come from."""
        spans: dict[str, int] = {}
        start = request.local
        for tier, end in request.held:
            stop = min(end, cut)
            if stop > start:
                spans[tier] = spans.get(tier, 0) + (stop - start) * self.bytes_per_token
                start = stop
        return spans

    def load(self, request: Request, cut: int) -> Estimate:
        """Predicted seconds until [local, cut) is in HBM."""
        spans = self._spans(request, cut)
        passing: dict[str, int] = {}
        slowest = Estimate(0.0, 0.0)
        last = Estimate(0.0, 0.0)
        for tier, nbytes in spans.items():
            via = self.fetches[tier].prior.via
            if via in self.fetches:
                passing[via] = passing.get(via, 0) + nbytes
                one = self.fetches[tier].predict(nbytes, request.queued.get(tier, 0))
                slowest = max(slowest, one)
            else:
                passing[tier] = passing.get(tier, 0) + nbytes
        for tier, nbytes in passing.items():
            last = max(last, self.fetches[tier].predict(nbytes, request.queued.get(tier, 0)))
        beyond = "; ".join(b for b in (slowest.beyond, last.beyond) if b)
        return Estimate(slowest.mean + last.mean, slowest.sd + last.sd, beyond)


def cuts(request: Request, chunk: int) -> list[int]:
    """Cuts worth trying, rising, the first being `local` (load nothing)."""
    most = request.tokens
    if request.max_load_tokens is not None:
        most = min(most, request.local + max(request.max_load_tokens, 0))
    found = {request.local}
    start = request.local
    for _, end in request.held:
        stop = min(end, most) // chunk * chunk
        if stop <= start:
            continue
        found.add(stop)
        for i in range(1, _INTERIOR + 1):
            inner = (start + (stop - start) * i // (_INTERIOR + 1)) // chunk * chunk
            if start < inner < stop:
                found.add(inner)
        start = stop
    return sorted(found)


def options(
    request: Request, prefill: Prefill, tiers: Tiers, chunk: int, traffic: Traffic | None = None
) -> list[Option]:
    """Every cut with its predicted times, the first being `recompute all`. `traffic` prices what it costs others."""
    out = []
    for cut in cuts(request, chunk):
        load = tiers.load(request, cut)
        # The last token is always computed: it makes the first logits.
        compute = prefill.predict(max(request.tokens - cut, 1), min(cut, request.tokens - 1), request.decoding)
        others = traffic.delay_s(compute.mean, request.wait_s) if traffic else 0.0
        out.append(Option(cut, load, compute, max(request.wait_s, load.mean) + compute.mean, others))
    return out


def best(choices: list[Option]) -> Option:
    """The cheapest; of equals the one that loads least."""
    return min(choices, key=lambda o: (o.price_s, o.cut))


def split(request: Request, prefill: Prefill, tiers: Tiers, chunk: int, to: int) -> tuple[int, float]:
    """Both ends at once: compute [local, m) while [m, to) loads. Returns m and the predicted total seconds.

    m is where both ends meet: found by bisection, since compute grows and load shrinks with it.
    """
    lo, hi = request.local // chunk, to // chunk
    span = request._replace(held=request.held)

    def times(m: int) -> tuple[float, float]:
        head = prefill.seconds(m * chunk - request.local, request.local, request.decoding)
        part = span._replace(local=max(m * chunk, request.local))
        return request.wait_s + head, tiers.load(part, to).mean

    while lo < hi:
        mid = (lo + hi) // 2
        head, load = times(mid)
        if head < load:
            lo = mid + 1
        else:
            hi = mid
    head, load = times(lo)
    tail = prefill.seconds(max(request.tokens - to, 1), min(to, request.tokens - 1), request.decoding)
    return lo * chunk, max(head, load) + tail
