"""Online estimates of times: a robust, decaying least-squares fit with a prior and an uncertainty.

    seconds ≈ Σ weight_i · feature_i,   weights ≥ 0,   noise proportional to the seconds

The last `window` observations are kept, older ones count less, and the prior counts like one observation of its
stated spread. When the newest observations all disagree with the fit in one direction, the world has changed:
everything older is dropped, so that a new speed is learned in `_RUN` observations, not in a window's length.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_RUN = 2
"""Observations in a row, off in one direction by more than `_JUMP`, that make a change of the world."""
_SETTLED = 6
"""Observations after a change until the new speed counts as known."""
_JUMP = 0.35
"""Natural log of the ratio observed / predicted that counts as off (1.42x)."""
_ANY = 30.0
"""Spread of a prior that says next to nothing."""
_BENDS, _MOST = 6, 0.8
"""Least earlier observations, and the share of them, that other weights must explain together with the newest."""
_HUBER = 0.3
"""Relative residual from which an observation loses weight: one stall must not move the fit."""
_DRIFT = 0.02
"""Relative uncertainty that each request without an observation adds (in quadrature)."""
_MIN_NOISE, _FIRST_NOISE = 0.02, 0.15


class Estimate(NamedTuple):
    """`mean` and standard deviation `sd`, seconds. `beyond` says in words what was extrapolated; empty = nothing."""

    mean: float
    sd: float
    beyond: str = ""


class Fit:
    """Weights of `len(prior)` non-negative features.

    prior   weights to start from, seconds per unit of the feature, > 0
    spread  relative standard deviation of each prior weight (1.0 = could be off by its own size)
    window  observations kept; the weight of one halves every `window / 3`
    shape   the prior is a shape whose size may be off: a change of speed scales it as a whole
    """

    def __init__(self, prior: Sequence[float], spread: Sequence[float], window: int = 32, shape: bool = False) -> None:
        if len(prior) != len(spread) or not prior or min(prior) <= 0 or min(spread) <= 0 or window < 4:
            raise ValueError("prior and spread need one positive number per feature, window >= 4")
        self.prior, self.spread, self.window, self.shape = tuple(prior), tuple(spread), window, shape
        self.weights: list[float] = list(prior)
        self.noise = _FIRST_NOISE
        self.observed = 0
        self.changes = 0
        self.age = 0
        self._rows: deque[tuple[tuple[float, ...], float]] = deque(maxlen=window)
        self._run = 0
        self._calm = self.noise
        self._covariance = [
            [(p * s) ** 2 if i == j else 0.0 for j in range(len(prior))]
            for i, (p, s) in enumerate(zip(prior, spread, strict=True))
        ]

    @property
    def doubted(self) -> bool:
        """The newest observation was far off: the next one says whether the world has changed."""
        return self._run != 0

    @property
    def unsettled(self) -> bool:
        """The newest observation was far off, or a change of speed was seen and little since."""
        return self.doubted or (self.changes > 0 and len(self._rows) < _SETTLED)

    def seconds(self, features: Sequence[float]) -> float:
        return sum(w * f for w, f in zip(self.weights, features, strict=True))

    def predict(self, features: Sequence[float]) -> Estimate:
        mean = self.seconds(features)
        c = self._covariance
        var = sum(features[i] * c[i][j] * features[j] for i in range(len(features)) for j in range(len(features)))
        var += (mean * self.noise) ** 2 + (mean * _DRIFT) ** 2 * min(self.age, 400)
        return Estimate(mean, math.sqrt(max(var, 0.0)))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """One finished piece of work. Values that are not positive and finite are ignored."""
        row = tuple(float(f) for f in features)
        if not (math.isfinite(seconds) and seconds > 0 and all(math.isfinite(f) and f >= 0 for f in row) and any(row)):
            return
        self._detect(row, seconds)
        self._rows.append((row, seconds))
        self.observed += 1
        self.age = 0
        self._refit()

    def observe_at_least(self, features: Sequence[float], seconds: float) -> None:
        """Work not finished after `seconds`: news only if it should have been finished by then."""
        if seconds > self.seconds(features):
            self.observe(features, seconds)

    def tick(self) -> None:
        """A request went by without an observation."""
        self.age += 1

    def _detect(self, row: tuple[float, ...], seconds: float) -> None:
        off = math.log(seconds / max(self.seconds(row), 1e-12))
        if self._run == 0:
            self._calm = self.noise  # the first of the news must not make the next look like noise
        jump = max(_JUMP, 3 * self._calm)
        if abs(off) < jump or self.observed == 0:
            self._run = 0
            return
        same = self._run == 0 or (off > 0) == (self._run > 0)
        self._run = (self._run if same else 0) + (1 if off > 0 else -1)
        if abs(self._run) >= _RUN:
            self._run = 0
            if self.shape and self._bend(row, seconds, jump / 2):
                return
            keep = _RUN - 1
            while len(self._rows) > keep:
                self._rows.popleft()
            # Start from the new speed: from the old one the robust fit would take the news for outliers.
            scale = math.exp(off)
            self.weights = [w * scale for w in self.weights]
            if self.shape:
                whole = seconds / max(sum(p * f for p, f in zip(self.prior, row, strict=True)), 1e-12)
                self.prior = tuple(p * whole for p in self.prior)
            self.changes += 1

    def _bend(self, row: tuple[float, ...], seconds: float, near: float) -> bool:
        """Take weights that explain the news together with what was seen before, if there are any: then not the size of
        the prior's shape was wrong but the shape, and nothing has changed."""
        trial = Fit(self.prior, (_ANY,) * len(self.prior), window=len(self._rows) + 4)
        trial.weights = list(self.weights)
        trial._rows.extend([*self._rows, (row, seconds)])
        for _ in range(8):
            trial._refit()
        off = [abs(math.log(y / max(trial.seconds(x), 1e-12))) < near for x, y in trial._rows]
        before = off[:-_RUN]
        if not all(off[-_RUN:]) or len(before) < _BENDS or sum(before) < _MOST * len(before):
            return False
        self.weights = trial.weights
        return True

    def _refit(self) -> None:
        n = len(self._rows)
        half = self.window / 3
        ages = [0.5 ** ((n - 1 - i) / half) for i in range(n)]
        # Noise counts at most so much against the prior: else a bad fit's residuals would make it believe the prior more.
        noise = min(self.noise, _FIRST_NOISE)
        for _ in range(6):
            a, b = self._prior_terms()
            for (row, y), age in zip(self._rows, ages, strict=True):
                fitted = max(self.seconds(row), 1e-12)
                residual = abs(y - fitted) / fitted
                # Huber: full weight inside the band; never none, or a real change of speed could not be learned.
                w = age * min(1.0, _HUBER / residual if residual > 0 else 1.0) / (fitted * noise) ** 2
                for i, fi in enumerate(row):
                    b[i] += w * fi * y
                    for j, fj in enumerate(row):
                        a[i][j] += w * fi * fj
            before = self.weights
            self.weights, self._covariance = _solve_positive(a, b, self.prior)
            if all(abs(w - o) <= 1e-3 * o for w, o in zip(self.weights, before, strict=True)):
                break
        self._measure_noise(ages)

    def _prior_terms(self) -> tuple[list[list[float]], list[float]]:
        k = len(self.prior)
        a = [[0.0] * k for _ in range(k)]
        b = [0.0] * k
        for i, (p, s) in enumerate(zip(self.prior, self.spread, strict=True)):
            wide = s * max(
                p, self.weights[i]
            )  # off by factors, not by amounts: ten times as slow is not ten deviations
            a[i][i] = 1 / wide**2
            b[i] = p / wide**2
        return a, b

    def _measure_noise(self, ages: Sequence[float]) -> None:
        total, square = 4.0, 4.0 * _FIRST_NOISE**2
        for (row, y), age in zip(self._rows, ages, strict=True):
            r = min(abs(y / max(self.seconds(row), 1e-12) - 1), 1.0)
            total += age
            square += age * r * r
        self.noise = max(_MIN_NOISE, math.sqrt(square / total))


def _solve_positive(
    a: list[list[float]], b: list[float], prior: Sequence[float]
) -> tuple[list[float], list[list[float]]]:
    """x with a·x = b, entries that would be negative pinned at (nearly) zero; and the inverse of a."""
    free = list(range(len(b)))
    floor = [p * 1e-6 for p in prior]
    while True:
        inverse = _invert([[a[i][j] for j in free] for i in free])
        pinned = [i for i in range(len(b)) if i not in free]
        rhs = [b[i] - sum(a[i][j] * floor[j] for j in pinned) for i in free]
        x = [sum(inverse[r][c] * rhs[c] for c in range(len(free))) for r in range(len(free))]
        worst = min(range(len(free)), key=lambda r: x[r] / prior[free[r]])
        if x[worst] >= floor[free[worst]] or len(free) == 1:
            break
        free.pop(worst)
    weights = list(floor)
    covariance = [[0.0] * len(b) for _ in b]
    for r, i in enumerate(free):
        weights[i] = max(x[r], floor[i])
        for c, j in enumerate(free):
            covariance[i][j] = inverse[r][c]
    return weights, covariance


def _invert(m: list[list[float]]) -> list[list[float]]:
    """Inverse of a symmetric positive definite matrix of up to a few rows (scaled to a unit diagonal first)."""
    n = len(m)
    scale = [1 / math.sqrt(m[i][i]) for i in range(n)]
    work = [
        [m[i][j] * scale[i] * scale[j] for j in range(n)] + [1.0 if i == j else 0.0 for j in range(n)] for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(work[r][i]))
        work[i], work[pivot] = work[pivot], work[i]
        p = work[i][i] if abs(work[i][i]) > 1e-12 else 1e-12
        work[i] = [v / p for v in work[i]]
        for r in range(n):
            if r != i and work[r][i]:
                f = work[r][i]
                work[r] = [v - f * u for v, u in zip(work[r], work[i], strict=True)]
    return [[work[i][n + j] * scale[i] * scale[j] for j in range(n)] for i in range(n)]
