"""The decision for one request, as a pure function of two estimates: how many tokens to load, the rest to recompute.

    total(k) = max(wait for the engine, load of [local, k)) + prefill of [k, n)

`k` may lie anywhere in what the tiers hold. Prefill grows faster than its tokens, so with one tier and an idle engine
the best k is one of the ends; a queue before the engine, a second tier or a cap moves it inside.

What a cut costs others is priced too: those that load now and come back while this one computes (`play`), and those
that come later and find the engine and the tier's link busier (`traffic`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple

from components.common.cost.estimate import Estimate
from components.common.cost.fetch import Fetch
from components.common.cost.prefill import Prefill
from components.common.cost.traffic import Traffic

_INTERIOR = 4
"""Cuts tried inside each tier's span beside its ends."""
_SEEN = 32
"""Loads under way that are looked at one by one: the soonest; the others count as one that comes after them."""


class Held(NamedTuple):
    """`tier` holds the prompt's KV from where the span before it (or the local hit) ends up to token `end`."""

    tier: str
    end: int


class Loading(NamedTuple):
    """A request before this one whose load is under way: predicted seconds until it is there, and of prefill then."""

    ready_s: float
    compute_s: float


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
    """Seconds of the caller's clock at arrival; None = unknown, what this request costs later ones is not priced."""
    loading: tuple[Loading, ...] = ()
    """Requests before this one that load, or were decided and are not counted in `wait_s` yet, in any order."""
    certain: bool = True
    """False: an index does not know whether what counts as held is there; nothing can be probed then."""
    found: bool | None = None
    """Whether it came while another one was being served; None: by `wait_s` and `loading`."""


class Option(NamedTuple):
    """One way to serve: load [local, cut), compute the rest. Seconds from now to the first token."""

    cut: int
    load: Estimate
    compute: Estimate
    total_s: float
    others_s: float = 0.0
    """Seconds it is expected to cost the other requests, all together."""

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

    def link(self, request: Request, cut: int) -> tuple[float, float]:
        """Seconds that [local, cut) occupies the tier it occupies longest, and what is queued there, in seconds."""
        worst = (0.0, 0.0)
        for tier, nbytes in self._spans(request, cut).items():
            rate = self.fetches[tier].bytes_per_s
            worst = max(worst, (nbytes / rate, request.queued.get(tier, 0) / rate))
        return worst


def play(wait_s: float, loading: Sequence[Loading], own: Loading | None) -> tuple[float, float]:
    """First come, first served: when `own` (the last to come) is through, and the sum of when those `loading` are.

    wait_s   until the engine is free of what is ready now
    loading  by `ready_s`; one that is ready when the engine is free goes before `own`
    """
    now, at, own_s, sum_s = wait_s, 0, 0.0, 0.0
    while own or at < len(loading):
        if at < len(loading) and (loading[at].ready_s <= now or not own or loading[at].ready_s <= own.ready_s):
            first, at = loading[at], at + 1
            now = max(now, first.ready_s) + first.compute_s
            sum_s += now
        else:
            assert own is not None
            now = own_s = max(now, own.ready_s) + own.compute_s
            own = None
    return own_s, sum_s


def soonest(loading: Sequence[Loading]) -> list[Loading]:
    """Sorted; a crowd's rest as one: it keeps the engine as busy, and its end is nobody's to decide here."""
    first = nsmallest(_SEEN, loading)
    if len(loading) > len(first):
        rest = sum(x.compute_s for x in loading) - sum(x.compute_s for x in first)
        first.append(Loading(first[-1].ready_s, rest))
    return first


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
    request: Request,
    prefill: Prefill,
    tiers: Tiers,
    chunk: int,
    traffic: Traffic | None = None,
    only: Sequence[int] = (),
) -> list[Option]:
    """Every cut with its predicted times, the first being `recompute all`. `traffic` prices what it costs later ones.

    only   these cuts instead, in this order
    """
    out = []
    loading = soonest(request.loading)
    alone = play(request.wait_s, loading, None)[1]
    for cut in only or cuts(request, chunk):
        load = tiers.load(request, cut)
        # The last token is always computed: it makes the first logits.
        compute = prefill.predict(max(request.tokens - cut, 1), min(cut, request.tokens - 1), request.decoding)
        total, beside = play(request.wait_s, loading, Loading(load.mean, compute.mean))
        others = beside - alone
        if traffic:
            others += traffic.delay_s(compute.mean, request.wait_s) + traffic.link_delay_s(*tiers.link(request, cut))
        out.append(Option(cut, load, compute, total, others))
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
