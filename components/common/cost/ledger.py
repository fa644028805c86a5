"""What was predicted, what came of it, and what choosing wrongly cost. Bounded memory; plain sums."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """One finished request. Seconds from decision to first token."""

    loaded: bool
    predicted_s: float
    other_s: float
    """Predicted for the best option of the other kind (load instead of recompute, or the reverse); inf = there was none."""
    actual_s: float
    explored_s: float = 0.0
    """Predicted seconds given away on purpose, to learn."""

    @property
    def regret_s(self) -> float:
        """Seconds lost against the better way as far as the estimates can tell (the other way was not run)."""
        return max(0.0, self.actual_s - self.other_s)


class Ledger:
    """Totals since the start and the last `keep` outcomes."""

    def __init__(self, keep: int = 256) -> None:
        self.recent: deque[Outcome] = deque(maxlen=keep)
        self.requests = self.loads = self.switches = self.beyond = self.missed_deadlines = 0
        self.served_s = self.predicted_s = self.regret_s = 0.0
        self.explored_s = self.probed_s = 0.0
        self.probes = 0
        self.probed_bytes = 0

    def add(self, outcome: Outcome) -> None:
        if not math.isfinite(outcome.actual_s) or outcome.actual_s < 0:
            return
        self.recent.append(outcome)
        self.requests += 1
        self.loads += outcome.loaded
        self.served_s += outcome.actual_s
        self.predicted_s += outcome.predicted_s
        self.regret_s += outcome.regret_s

    def probe(self, seconds: float, nbytes: int) -> None:
        self.probes += 1
        self.probed_s += seconds
        self.probed_bytes += nbytes

    def may_explore(self, seconds: float, budget: float, first_s: float) -> bool:
        """Whether a request may give away `seconds`: all of them `budget` per second served (`first_s` is free)."""
        return self.explored_s + seconds <= first_s + budget * self.served_s

    def may_probe(self, seconds: float, budget: float, first_s: float) -> bool:
        """The same of background reads. Apart: nobody waits for those, and looks at a slow store take long."""
        return self.probed_s + seconds <= first_s + budget * self.served_s

    def report(self) -> dict[str, Any]:
        """For metrics and `status --explain`: totals, and the error of the last predictions (median of actual/predicted)."""
        ratios = sorted(o.actual_s / o.predicted_s for o in self.recent if o.predicted_s > 0)
        return {
            "requests": self.requests,
            "loads": self.loads,
            "switches": self.switches,
            "extrapolated": self.beyond,
            "missed_deadlines": self.missed_deadlines,
            "served_s": self.served_s,
            "predicted_s": self.predicted_s,
            "regret_s": self.regret_s,
            "explored_s": self.explored_s,
            "probes": self.probes,
            "probed_s": self.probed_s,
            "probed_bytes": self.probed_bytes,
            "actual_over_predicted_p50": ratios[len(ratios) // 2] if ratios else None,
        }
