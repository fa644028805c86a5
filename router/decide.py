"""Decisions: a question's token ids in, the prefill worker to pin out. One event loop owns it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Protocol

from components.common.messages.router import Decide, Decision, Note
from router.bookings import Bookings
from router.config import RouterConfig
from router.metrics import Metrics
from router.score import Candidate, Overlap, Weights, choose


class PoolView(Protocol):
    """What a decision needs of a pool (router.pool.Pool; a fake in unit tests)."""

    def workers(self) -> list[int]: ...
    async def overlaps(self, ids: list[int], salt: str) -> dict[int, Overlap]: ...


class Decider:
    """Holds bookings and when each worker was used last.

    Every booking ends with a note, with its worker, or by TTL. A worker the index knows but discovery does not
    (dead, entry not yet expired) is never named.
    """

    def __init__(self, config: RouterConfig, pool: PoolView | None, metrics: Metrics | None = None) -> None:
        self.config, self.pool = config, pool
        self.metrics = metrics or Metrics()
        self.bookings = Bookings(config.booking_ttl_s)
        self.weights = Weights(config.host_hit_weight, config.blob_hit_weight)
        self.used: dict[int, float] = {}
        self._deciding: dict[str, bool] = {}
        self._predicted: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def expect(self, rid: str) -> None:
        """A question was received: a `done` that arrives before it is decided ends it, too."""
        self._deciding.setdefault(rid, True)

    async def decide(self, q: Decide) -> Decision:
        """Never raises: no advice is an answer, with the reason in `error`."""
        started = time.perf_counter()
        self.expect(q.rid)
        try:
            decision = await self._decide(q)
        except asyncio.CancelledError:
            raise
        except Exception as e:
            decision = Decision(n=q.n, error=f"{type(e).__name__}: {e}")
        finally:
            self._deciding.pop(q.rid, None)
        self.metrics.decision(decision, len(q.ids), time.perf_counter() - started)
        return decision

    async def _decide(self, q: Decide) -> Decision:
        if self.pool is None:
            return Decision(n=q.n, error="the graph has no prefill pool")
        overlaps = await self.pool.overlaps(q.ids, q.salt)
        workers = self.pool.workers()
        self._forget_gone(workers)
        if not workers:
            return Decision(n=q.n, error="no prefill worker is there")
        candidates = [
            Candidate(w, overlaps.get(w, Overlap()), self.bookings.tokens(w), self.used.get(w, 0.0)) for w in workers
        ]
        choice = choose(candidates, len(q.ids), self.config.block_size, self.weights)
        assert choice is not None
        self.used[choice.worker] = time.monotonic()
        if not self._deciding.get(q.rid):  # over before it was decided: nothing left to book
            return Decision(n=q.n, prefill=choice.worker, overlap_blocks=choice.overlap_blocks)
        self.bookings.book(q.rid, choice.worker, choice.prefill_tokens, choice.overlap_blocks * self.config.block_size)
        self._predict(q.rid, choice.worker, choice.overlap_blocks * self.config.block_size)
        return Decision(n=q.n, prefill=choice.worker, overlap_blocks=choice.overlap_blocks)

    def note(self, note: Note) -> None:
        if note.rid in self._deciding:
            self._deciding[note.rid] = False
        self.bookings.end(note.rid)
        if note.op != "done":
            return
        predicted = self._predicted.pop(note.rid, None)
        if predicted and note.cached_tokens is not None and note.served in (None, predicted[0]):
            self.metrics.audit(predicted[0], predicted[1], note.cached_tokens, self.config.block_size)

    def sweep(self) -> None:
        """To be called every few seconds."""
        self.bookings.sweep()
        if self.pool is not None:
            self._forget_gone(self.pool.workers())
        self.metrics.state(self.bookings, self.pool.workers() if self.pool else [])

    def _predict(self, rid: str, worker: int, tokens: int) -> None:
        self._predicted[rid] = (worker, tokens)
        while len(self._predicted) > self.bookings.most:
            self._predicted.popitem(last=False)

    def _forget_gone(self, workers: list[int]) -> None:
        gone = self.used.keys() - set(workers)
        if gone:
            self.bookings.forget(gone)
            for w in gone:
                del self.used[w]
