"""Fetch time of a tier: fixed + (bytes queued before + bytes) / rate, learned from the tier's own completions."""

from __future__ import annotations

from components.common.cost.config import TierPrior
from components.common.cost.estimate import Estimate, Fit

_GIVEN_UP = 10.0
"""Times its deadline that a load given up counts as having taken at most: nothing arrived says only `slow`."""
_REACH = 4.0
"""Bytes past the largest load seen, as a factor, that still count as measured: rate and latency are linear."""


class Fetch:
    """Estimate of one tier as one worker sees it. `queued` is always bytes asked of the tier before and not yet here."""

    def __init__(self, prior: TierPrior) -> None:
        self.prior = prior
        self._fit = Fit((prior.fixed_s, 1 / prior.bytes_per_s), (prior.spread, prior.spread), window=24)
        self._seen = 0
        self._newest = (0, 0.0)

    @property
    def fixed_s(self) -> float:
        return self._fit.weights[0]

    @property
    def bytes_per_s(self) -> float:
        return 1 / self._fit.weights[1]

    @property
    def observed(self) -> int:
        return self._fit.observed

    @property
    def changes(self) -> int:
        """Sudden changes of speed seen."""
        return self._fit.changes

    @property
    def unsettled(self) -> bool:
        """The newest measurement was far off the estimate, or few came since the speed changed."""
        return self._fit.unsettled

    @property
    def age(self) -> int:
        """Requests since the last measurement."""
        return self._fit.age

    def seconds(self, nbytes: int, queued: int = 0) -> float:
        return self._fit.seconds((1.0, float(nbytes + queued))) if nbytes > 0 else 0.0

    def look_s(self, nbytes: int) -> float:
        """Seconds that reading `nbytes` to measure may take: while a change is suspected the newest measurement says it."""
        last, seconds = self._newest
        if not self.unsettled or not last:
            return self.seconds(nbytes)
        return max(seconds * nbytes / last, min(seconds, self.fixed_s))

    def predict(self, nbytes: int, queued: int = 0) -> Estimate:
        if nbytes <= 0:
            return Estimate(0.0, 0.0)
        mean, sd, _ = self._fit.predict((1.0, float(nbytes + queued)))
        if self._fit.observed == 0:
            return Estimate(mean, sd, f"{self.prior.name} never measured (prior)")
        if nbytes + queued > self._seen * _REACH:
            return Estimate(
                mean,
                sd + 0.25 * mean,
                f"{self.prior.name} load of {nbytes + queued} bytes (largest measured {self._seen})",
            )
        return Estimate(mean, sd)

    def observe(self, nbytes: int, seconds: float, queued: int = 0) -> None:
        """A load of `nbytes` was complete `seconds` after it was asked for."""
        if nbytes <= 0:
            return
        before = self._fit.observed
        self._fit.observe((1.0, float(nbytes + queued)), seconds)
        if self._fit.observed > before:
            self._seen = max(self._seen, nbytes + queued)
            self._newest = (nbytes + queued, seconds)

    def gave_up(self, nbytes: int, arrived: int, seconds: float, queued: int = 0) -> None:
        """Of a load of `nbytes` only `arrived` bytes were there after `seconds`: it would have taken that much longer.

        What was queued before counts as passed: a load that waited behind others until it was given up says no more.
        """
        if nbytes > 0:
            longer = max(1.0, min(_GIVEN_UP, (nbytes + queued) / max(arrived + queued, 1)))
            before = self._fit.observed
            self._fit.observe_at_least((1.0, float(nbytes + queued)), seconds * longer)
            self._seen = max(self._seen, arrived + queued)
            if self._fit.observed > before:
                self._newest = (nbytes + queued, seconds * longer)

    def tick(self) -> None:
        self._fit.tick()
