"""Prefill time: a·steps + b·tokens + c·pairs, from a hardware profile and then from the engine itself.

pairs = tokens·(context + tokens/2), the query-key pairs of causal attention: with it one curve serves every split of
a prompt, since computing [k, n) after k cached tokens costs what the curve says for n less what it says for k.
"""

from __future__ import annotations

import math

from components.common.cost.config import HardwareProfile
from components.common.cost.estimate import Estimate, Fit

_REACH = 1.25
"""How far past the longest known prompt a prediction counts as measured."""


class Prefill:
    """Prefill estimate of one engine.

    step_tokens  tokens per engine step here; 0 = the profile's
    """

    def __init__(self, profile: HardwareProfile, step_tokens: int = 0) -> None:
        self.profile = profile
        self.step_tokens = step_tokens or profile.max_batched_tokens
        self._fit = Fit(
            _weights_of(profile), (1.0, 0.3, 0.6) if profile.estimate else (0.5, 0.3, 0.3), window=32, shape=True
        )
        measured = [p.tokens for p in profile.curve if not profile.estimated_from or p.tokens < profile.estimated_from]
        self._known = 0 if profile.estimate else max(measured, default=0)

    @property
    def observed(self) -> int:
        return self._fit.observed

    @property
    def doubted(self) -> bool:
        """The newest measurement was far off the estimate."""
        return self._fit.doubted

    @property
    def age(self) -> int:
        """Requests since the last measurement."""
        return self._fit.age

    def seconds(self, tokens: int, context: int = 0, decoding: int = 0) -> float:
        """Mean seconds to compute `tokens` new tokens after `context` cached ones beside `decoding` sequences."""
        if tokens <= 0:
            return 0.0
        return self._fit.seconds(self._features(tokens, context)) + self._beside(tokens, decoding)

    def predict(self, tokens: int, context: int = 0, decoding: int = 0) -> Estimate:
        if tokens <= 0:
            return Estimate(0.0, 0.0)
        mean, sd, _ = self._fit.predict(self._features(tokens, context))
        beyond = ""
        if tokens + context > self._known * _REACH:
            known = f"measured up to {self._known}" if self._known else f"profile '{self.profile.name}' is an estimate"
            beyond = f"prefill of {tokens + context} tokens ({known})"
            sd += 0.25 * mean
        return Estimate(mean + self._beside(tokens, decoding), sd, beyond)

    def observe(self, tokens: int, context: int, seconds: float, decoding: int = 0) -> None:
        """The engine computed `tokens` new tokens after `context` cached ones in `seconds` of its own time."""
        if tokens <= 0:
            return
        own = seconds - self._beside(tokens, decoding)
        before = self._fit.observed
        self._fit.observe(self._features(tokens, context), own)
        if self._fit.observed > before:
            self._known = max(self._known, tokens + context)

    def observe_step(self, tokens: int, pairs: float, reach: int, seconds: float, decoding: int = 0) -> None:
        """One engine step computed `tokens` new tokens of any prompts, `pairs` query-key pairs, up to position `reach`."""
        before = self._fit.observed
        self._fit.observe((1.0, float(tokens), pairs), seconds - decoding * self.profile.sequence_step_s)
        if self._fit.observed > before:
            self._known = max(self._known, reach)

    def tick(self) -> None:
        self._fit.tick()

    def _features(self, tokens: int, context: int) -> tuple[float, float, float]:
        return (float(math.ceil(tokens / self.step_tokens)), float(tokens), tokens * (context + tokens / 2))

    def _beside(self, tokens: int, decoding: int) -> float:
        return math.ceil(tokens / self.step_tokens) * decoding * self.profile.sequence_step_s


def _weights_of(profile: HardwareProfile) -> tuple[float, float, float]:
    """The three weights that fit a profile's points best, each point's relative error counting the same."""
    first = profile.curve[0]
    guess = (first.seconds * 0.1, first.seconds / first.tokens, first.seconds / first.tokens / 50_000)
    fit = Fit(guess, (30.0, 30.0, 30.0), window=max(4, 3 * len(profile.curve)))
    for point in profile.curve:
        steps = math.ceil(point.tokens / profile.max_batched_tokens)
        fit._rows.append(((float(steps), float(point.tokens), point.tokens**2 / 2), point.seconds))
    for _ in range(8):
        fit._refit()
    return tuple(max(w, g * 1e-3) for w, g in zip(fit.weights, guess, strict=True))  # type: ignore[return-value]
