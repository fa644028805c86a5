"""What a request costs those after it: arrivals per second, decayed, and how much of what they could load they do.

Chosen by its own interest alone, a request would rather compute than queue for the store; but every request that comes
until it is through finds the engine busier: one that comes while its turn is waited for (`wait` seconds) waits all of its
prefill longer, one that comes during the prefill half of it on average, less what it escapes by loading itself:
rate · S · (wait + 0.75 · S/2) seconds. The link of a tier is a second queue and priced alike, for those who load:
without that an idle link looks free, and at break-even all load and the engine stands idle. The prompts that wait for
the engine already are not priced: they can choose to load (pricing them was tried and overshoots); those that load
already cannot choose any more and are priced exactly (`decide.play`).

Mean regret to hindsight of 18 cells, seeds 0 to 3 of `bench simulate`, when each was added and by the oracle of then: only
the engine 5.0 %, and those that load 4.9 %, and the link 4.1 %; a search over sampled futures that knows the true rates
got 3.9 %.

All that holds where arrivals do not wait for answers. One client that does is always alone: counted are therefore the
arrivals that find a request being served, against those that independent arrivals would have found.
"""

from __future__ import annotations

import math

_MEMORY = 0.9
"""Share of the weight that an arrival keeps when the next comes: about ten are remembered."""

_LONG_MEMORY = 0.95
"""The same for how many found another one being served: about twenty are remembered."""
_FOUND_LEAST = 1.25
"""Factor on that share, so that luck alone does not lower the price."""

_STAY = 0.75
"""Share of the wait behind a running prefill or load that those who come meanwhile do not escape by the other way."""


class Traffic:
    """Arrivals as one worker sees them."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gap_s = self._arrivals = 0.0
        self._loaded, self._could = 0.5, 1.0
        self._found, self._would_find = 1.0, 1.0
        self._served_s = self._share = 0.0

    @property
    def rate(self) -> float:
        """Arrivals per second; 0 until three were seen."""
        return self._arrivals / self._gap_s if self._arrivals > 2 and self._gap_s > 0 else 0.0

    @property
    def independent(self) -> float:
        """Share of arrivals that do not wait for the answer before; 1 = all (and until more is known)."""
        return min(1.0, _FOUND_LEAST * self._found / self._would_find)

    def arrived(self, at: float | None, found: bool = True) -> None:
        """A request came at `at` seconds of the caller's clock; None = the caller has none, nothing is priced.

        found   another one is being served or waits
        """
        if at is None:
            return
        if self._last is not None:
            self._gap_s = self._gap_s * _MEMORY + max(at - self._last, 0.0)
            self._arrivals = self._arrivals * _MEMORY + 1
            self._found = self._found * _LONG_MEMORY + found
            self._would_find = self._would_find * _LONG_MEMORY + 1 - math.exp(-self.rate * self._served_s)
        self._last = at if self._last is None else max(self._last, at)

    def decided(self, seconds: float, share: float | None = None) -> None:
        """A request is served in so many seconds from now, and loads `share` of all that it could (0 to 1; None = nothing)."""
        self._served_s, self._share = seconds, share or 0.0
        if share is not None:
            self._loaded = self._loaded * _MEMORY + share
            self._could = self._could * _MEMORY + 1

    def undone(self, seconds: float) -> None:
        """What was decided last loads nothing after all, and is served in so many seconds."""
        self._served_s = seconds
        self._loaded -= self._share
        self._share = 0.0

    def delay_s(self, engine_s: float, wait_s: float = 0.0) -> float:
        """Seconds that the others lose, all together, to a prefill of `engine_s` that starts in `wait_s`."""
        return self.independent * self.rate * engine_s * (wait_s + _STAY * engine_s / 2)

    def link_delay_s(self, link_s: float, queued_s: float = 0.0) -> float:
        """Seconds that the others lose, all together, to a load that occupies a tier for `link_s` after `queued_s`."""
        return self.independent * self.rate * self._loaded / self._could * link_s * (queued_s + _STAY * link_s / 2)
