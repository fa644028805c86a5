"""What a prefill costs the requests after it: arrivals per second, decayed.

Chosen by its own interest alone, a request would rather compute than queue for the store; but every request that comes
until it is through finds the engine busier: one that comes while its turn is waited for (`wait` seconds) waits all of its
prefill longer, one that comes during the prefill half of it on average, less what it escapes by loading itself:
rate · S · (wait + 0.75 · S/2) seconds. The prompts waiting already are not priced: they can choose to load (pricing
them was tried in the simulator and overshoots). Without the `wait` term the regret to hindsight was 6.3 % over two
seeds of arrivals, with it 4.3 %: queues that build at high load are where using both ways at once pays most.
"""

from __future__ import annotations

_MEMORY = 0.9
"""Share of the weight that an arrival keeps when the next comes: about ten are remembered."""

_STAY = 0.75
"""Share of the wait behind a running prefill that those who come meanwhile do not escape by loading."""


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

    def delay_s(self, engine_s: float, wait_s: float = 0.0) -> float:
        """Seconds that the others lose, all together, to a prefill of `engine_s` that starts in `wait_s`."""
        return self.rate * engine_s * (wait_s + _STAY * engine_s / 2)
