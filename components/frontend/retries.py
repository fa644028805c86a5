"""A budget of second tries that change nothing, so that a failing graph is not asked twice for everything."""

from __future__ import annotations

SHARE, BURST = 0.1, 32.0
"""A second try for every tenth request, saved up to 32: a short burst of failures is hidden, an outage is not doubled."""


class RetryBudget:
    def __init__(self, share: float = SHARE, burst: float = BURST) -> None:
        self._share, self._burst, self._left = share, burst, burst

    def request(self) -> None:
        """A first try was made."""
        self._left = min(self._burst, self._left + self._share)

    def take(self) -> bool:
        """Whether a second try may be made now."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
