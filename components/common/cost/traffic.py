"""What a prefill costs the requests after it: arrivals per second, decayed.

Chosen by its own interest alone, a request would rather compute than queue for the store; but while it computes, every
request that comes finds the engine busy and waits half of the prefill on average: rate · S²/2 seconds. The prompts
waiting already are not priced: they can choose to load (pricing them, or the store's link, was tried in the simulator
and overshoots).
"""

from __future__ import annotations

_MEMORY = 0.9
"""Share of the weight that an arrival keeps when the next comes: about ten are remembered."""


class Traffic:
    """Arrivals as one worker sees them."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gap_s = self._arrivals = 0.0

    @property
    def rate(self) -> float:
        """Arrivals per second; 0 until three were seen."""
        return self._arrivals / self._gap_s if self._arrivals > 2 and self._gap_s > 0 else 0.0

    def arrived(self, at: float | None) -> None:
        """A request came at `at` seconds of the caller's clock; None = the caller has none, nothing is priced."""
        if at is None:
            return
        if self._last is not None:
            self._gap_s = self._gap_s * _MEMORY + max(at - self._last, 0.0)
            self._arrivals = self._arrivals * _MEMORY + 1
        self._last = at

    def delay_s(self, engine_s: float) -> float:
        """Seconds that the others lose, all together, to a prefill of `engine_s`."""
        return self.rate * engine_s**2 / 2
