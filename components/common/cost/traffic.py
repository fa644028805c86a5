"""What a prefill costs the requests that load: arrivals and the use of the engine, decayed.

Chosen by its own interest alone, a request would rather compute than queue for the store; but while it computes, every
request whose load is complete waits for the engine, half of the prefill on average: rate · share that loads · S²/2
seconds, and more the busier the engine is. The prompts waiting already are not priced: they can choose to load
(pricing them was tried in the simulator and overshoots).
"""

from __future__ import annotations

_MEMORY = 0.9
_MOST_BUSY = 0.8
"""Utilisation counted at most: the price stays finite, and one burst is not eternity."""


class Traffic:
    """Arrivals and engine use as one worker sees them; remembers about ten requests."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gap_s = self._arrivals = self._engine_s = self._loads = 0.0

    @property
    def rate(self) -> float:
        """Arrivals per second; 0 until three were seen."""
        return self._arrivals / self._gap_s if self._arrivals > 2 and self._gap_s > 0 else 0.0

    @property
    def busy(self) -> float:
        """Share of the time the engine prefills, 0 to 0.8."""
        return min(self._engine_s / self._gap_s, _MOST_BUSY) if self._gap_s > 0 else 0.0

    @property
    def loading(self) -> float:
        """Share of the requests that load."""
        return min(self._loads / self._arrivals, 1.0) if self._arrivals else 0.0

    def arrived(self, at: float | None) -> None:
        """A request came at `at` seconds of the caller's clock; None = the caller has none, nothing is priced."""
        if at is None:
            return
        if self._last is not None:
            self._gap_s = self._gap_s * _MEMORY + max(at - self._last, 0.0)
            self._arrivals = self._arrivals * _MEMORY + 1
            self._engine_s *= _MEMORY
            self._loads *= _MEMORY
        self._last = at

    def chose(self, engine_s: float, loads: bool) -> None:
        """The request that arrived last will keep the engine busy for `engine_s`."""
        self._engine_s += engine_s
        self._loads += loads

    def delay_s(self, engine_s: float) -> float:
        """Seconds that the others lose, all together, to a prefill of `engine_s`."""
        return self.rate * self.loading * engine_s**2 / 2 / (1 - self.busy)
