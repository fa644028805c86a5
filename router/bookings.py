"""What this router has promised to workers and they have not finished: the load part of a score."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Booking(NamedTuple):
    worker: int
    tokens: int
    """Prompt tokens the worker must prefill (overlap already taken off)."""
    at: float
    predicted: int
    """Prompt tokens expected to be cached on the worker."""


class Bookings:
    """Prefill work given out, by request id. Bounded by time and by number: a gateway that dies leaks nothing.

    ttl_s      a booking nobody ended is dropped after this
    most       more bookings than this drop the oldest
    A booking ends with `end` (the first byte was seen, or the request is over); ending twice is no error.
    """

    def __init__(self, ttl_s: float, most: int = 65536, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl_s, self.most, self.clock = ttl_s, most, clock
        self.expired = 0
        self._by_rid: OrderedDict[str, Booking] = OrderedDict()
        self._tokens: dict[int, int] = {}
        self._count: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def book(self, rid: str, worker: int, tokens: int, predicted: int = 0) -> None:
        self.end(rid)
        self._by_rid[rid] = Booking(worker, tokens, self.clock(), predicted)
        self._tokens[worker] = self._tokens.get(worker, 0) + tokens
        self._count[worker] = self._count.get(worker, 0) + 1
        while len(self._by_rid) > self.most:
            self._drop_oldest()

    def end(self, rid: str) -> Booking | None:
        booking = self._by_rid.pop(rid, None)
        if booking is not None:
            self._release(booking)
        return booking

    def sweep(self) -> int:
        """Drop what is older than the TTL; returns how many. Bookings are in order of time."""
        before, now = self.expired, self.clock()
        while self._by_rid and now - next(iter(self._by_rid.values())).at > self.ttl_s:
            self._drop_oldest()
        return self.expired - before

    def tokens(self, worker: int) -> int:
        return self._tokens.get(worker, 0)

    def count(self, worker: int) -> int:
        return self._count.get(worker, 0)

    def forget(self, workers: Iterable[int]) -> None:
        """Drop the bookings of workers that are gone."""
        gone = set(workers)
        for rid in [r for r, b in self._by_rid.items() if b.worker in gone]:
            self.end(rid)

    def check_integrity(self) -> None:
        """Sums equal the parts; for tests."""
        for worker in {*self._tokens, *self._count, *(b.worker for b in self._by_rid.values())}:
            mine = [b.tokens for b in self._by_rid.values() if b.worker == worker]
            assert (sum(mine), len(mine)) == (self.tokens(worker), self.count(worker)), worker

    def _drop_oldest(self) -> None:
        _, booking = self._by_rid.popitem(last=False)
        self._release(booking)
        self.expired += 1

    def _release(self, b: Booking) -> None:
        self._tokens[b.worker] -= b.tokens
        self._count[b.worker] -= 1
        if not self._count[b.worker]:
            del self._tokens[b.worker], self._count[b.worker]
