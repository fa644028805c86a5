"""Existence of chunks, asked without ever blocking the scheduler and answered within a deadline.

A name is True, False, or None = "ask again next step". None never lasts: the store answers, or the
deadline makes it False. At most `window` questions of one request and cache group are open at a
time, so a prompt of 10,000 chunks costs the scheduler a bounded time per step.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable

from components.common.kv.index import Index
from components.common.transfer.base import Transport

NEGATIVE_S = 1.0
"""Seconds a name stays a miss after the store said so, or said nothing in time."""


class Lookups:
    """Used by the scheduler thread only, but for `_known`, which other threads call."""

    def __init__(
        self, index: Index, deadline_s: float, window: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._index, self._deadline_s, self._window, self._clock = index, deadline_s, window, clock
        self._open: dict[str, float] = {}
        self._negative: dict[str, float] = {}
        self._batch: dict[Transport, list[str]] = {}
        self._answers: queue.SimpleQueue[dict[str, bool | None]] = queue.SimpleQueue()
        self._asked: Counter[tuple[str, int]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.found: Callable[[str], None] = lambda name: None

    def lookup(self, name: str, transport: Transport, request: str, group: int) -> bool | None:
        """True, False, or None while the store is asked."""
        known = self._index.lookup(name)
        if known is False or self.is_negative(name):
            return self._miss("absent")
        if known is True:
            return True
        if not transport.available(False):
            return self._miss("breaker")
        deadline = self._open.get(name)
        now = self._clock()
        if deadline is not None:
            if now < deadline:
                self._asked[request, group] += 1
                return None
            self.negative(name)
            return self._miss("lookup_late")
        if self._asked[request, group] >= self._window:
            return False  # ends this scan; the open questions before it make the request ask again
        self._asked[request, group] += 1
        self._open[name] = now + self._deadline_s
        self._batch.setdefault(transport, []).append(name)
        return None

    def negative(self, name: str) -> None:
        """A miss for a while, whatever the index says: after a failed load, or no answer in time."""
        self._open.pop(name, None)
        self._negative[name] = self._clock() + NEGATIVE_S

    def stored(self, name: str) -> None:
        """It was missing a moment ago and is there now."""
        self._negative.pop(name, None)

    def is_negative(self, name: str) -> bool:
        until = self._negative.get(name)
        return until is not None and self._clock() < until

    def end_of_step(self) -> None:
        """Send this step's questions, take the answers that came."""
        self._asked.clear()
        now = self._clock()
        for transport, names in self._batch.items():
            transport.exists(names, now + self._deadline_s, self._answers.put)
        self._batch.clear()
        self.take_answers()
        if len(self._negative) > 4 * self._window:
            self._negative = {n: t for n, t in self._negative.items() if t > now}

    def take_answers(self) -> None:
        while True:
            try:
                answers = self._answers.get_nowait()
            except queue.Empty:
                return
            for name, there in answers.items():
                if self._open.pop(name, None) is None:
                    continue
                if there:
                    self.found(name)
                else:
                    self.reasons["absent" if there is False else "lookup_unknown"] += 1
                    self._negative[name] = self._clock() + NEGATIVE_S

    @property
    def open(self) -> int:
        return len(self._open)

    def _miss(self, reason: str) -> bool:
        self.reasons[reason] += 1
        return False
