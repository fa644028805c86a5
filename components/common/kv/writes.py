"""Bounded write amplification: bytes put per byte of distinct chunks.

A chunk that was evicted and computed again is put again. Where the budget of a class is far below its working set that
can go on for ever, and every such put costs a write and may push out something better. So a worker puts a chunk again
only while what it put in all stays within `most` times what it put for the first time. A refused chunk stays in DRAM
and HBM; the next miss on it costs a recomputation, as without the tier.

Counted per worker, at the hand-over to the store (a failed put counts: its bytes were sent); memory of what was put is
bounded, oldest forgotten first, and does not outlive the process: a chunk forgotten counts as new. Sums halve every
`half_life_s`, so that a good week buys no bad day. One thread (the scheduler's).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from components.common.kv.catalogue import fragment


class WriteBudget:
    """most >= 1; `slack` objects may be put again before any ratio means something."""

    def __init__(
        self,
        most: float,
        *,
        slack: int = 8,
        capacity: int = 1 << 17,
        half_life_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if most < 1:
            raise ValueError("write amplification is 1 at least")
        self.most, self._slack, self._capacity, self._half_life_s, self._clock = (
            most,
            slack,
            capacity,
            half_life_s,
            clock,
        )
        self._put: OrderedDict[int, None] = OrderedDict()
        self.first = self.again = 0.0
        self.refused = 0
        self._at = clock()

    def admit(self, name: str, nbytes: int) -> bool:
        """Count a put of `name` that is about to be made; False = it would exceed the bound, do not make it."""
        self._decay()
        key = fragment(name)
        if key not in self._put:
            self.first += nbytes
        elif self.again + nbytes <= (self.most - 1) * self.first + self._slack * nbytes:
            self.again += nbytes
        else:
            self.refused += 1
            return False
        self._put[key] = None
        self._put.move_to_end(key)
        if len(self._put) > self._capacity:
            self._put.popitem(last=False)
        return True

    @property
    def amplification(self) -> float:
        return (self.first + self.again) / self.first if self.first else 1.0

    def status(self) -> dict[str, float]:
        return {"amplification": round(self.amplification, 3), "most": self.most, "refused": self.refused}

    def _decay(self) -> None:
        now = self._clock()
        if now - self._at >= self._half_life_s / 64:
            keep = 0.5 ** ((now - self._at) / self._half_life_s)
            self.first, self.again, self._at = self.first * keep, self.again * keep, now
