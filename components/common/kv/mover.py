"""Moves chunks between DRAM rows and objects, through staging, with proof.

Store: wait for a slot, copy the row into it, seal it, write; visible when the store says so; a sample
is read back. Load: wait for a slot, read, prove (length, format, tenant, namespace, key, digest), only then
copy into the DRAM row. Every chunk ends exactly once, within its deadline, with a reason.

The scheduler thread only appends to queues. `workers` threads copy and digest (both without the GIL);
transfers are driven by the transport's own thread.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from components.common.kv.fence import Flight
from components.common.kv.keys import parse_name
from components.common.kv.objects import HEADER_BYTES, Codec
from components.common.transfer.base import Outcome, Transport
from components.common.transfer.staging import Slot, StagingPool

log = logging.getLogger(__name__)

Reason = Literal[
    "ok", "missing", "failed", "late", "refused", "queue_full", "closed",
    "format", "length", "tenant", "namespace", "key", "digest", "unverified",
]  # fmt: skip
"""How a chunk ended. Everything but "ok" is a miss (load) or an object that is not indexed (store)."""

_TICK_S = 0.05
_TAIL = 64


@dataclass(slots=True, eq=False)
class Unit:
    """One chunk on its way. `row` is its row in DRAM (uint8), valid until `done(unit, reason)` was called.

    `guard` is asked just before an object is sent, when it is there, and before it is used: False means that it is
    no longer wanted (the tenant was purged meanwhile). `flight` follows a put until its transfer really is over.
    """

    store: bool
    transport: Transport
    name: str
    row: np.ndarray[Any, Any]
    deadline: float
    done: Callable[[Unit, Reason], None]
    guard: Callable[[], bool] | None = None
    flight: Flight | None = None
    slot: Slot | None = None
    begun: float = field(default_factory=time.monotonic)
    outcome: Outcome | None = None
    verify: bool = False
    over: bool = False


class Mover:
    """`reserve` slots are kept for loads: a burst of stores never delays a request that waits for its prefix."""

    def __init__(
        self,
        pool: StagingPool,
        codec: Codec,
        *,
        workers: int = 2,
        store_queue: int = 64,
        verify_puts: float = 0.0,
        skip_proof: bool = False,
        seed: int | None = None,
    ) -> None:
        self.pool, self.codec = pool, codec
        self._store_queue, self._verify_puts, self._skip_proof = store_queue, verify_puts, skip_proof
        self._reserve = min(pool.count // 2, max(1, pool.count // 4))
        self._random = random.Random(seed)
        self._lock = threading.Condition()
        self._loads: deque[Unit] = deque()
        self._stores: deque[Unit] = deque()
        self._landed: deque[Unit] = deque()
        self._live = 0
        self._closed = False
        self.reasons: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run, name="kv-mover", daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    # ---- scheduler thread

    def load(self, unit: Unit) -> None:
        self._enqueue(unit, self._loads)

    def store(self, unit: Unit) -> bool:
        """False: the queue is full, the chunk is dropped (it was computed; it can be computed again)."""
        with self._lock:
            full = len(self._stores) >= self._store_queue
        if full:
            self.reasons["store_queue_full"] += 1
            return False
        unit.verify = self._verify_puts > 0 and self._random.random() < self._verify_puts
        self._enqueue(unit, self._stores)
        return True

    @property
    def queued_loads(self) -> int:
        return len(self._loads)

    @property
    def queued_stores(self) -> int:
        return len(self._stores)

    @property
    def live(self) -> int:
        """Chunks not ended yet."""
        return self._live

    def drain(self, timeout: float) -> bool:
        """Wait until every chunk has ended; deadlines bound it."""
        with self._lock:
            return self._lock.wait_for(lambda: self._live == 0, timeout)

    def close(self, timeout: float) -> bool:
        """Queued chunks end as "closed", the others by their outcome. True when all have ended."""
        with self._lock:
            self._closed = True
            waiting = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._lock.notify_all()
        for unit in waiting:
            self._end(unit, "closed")
        drained = self.drain(timeout)
        for thread in self._threads:
            thread.join(1.0)
        return drained

    def _enqueue(self, unit: Unit, queue: deque[Unit]) -> None:
        with self._lock:
            closed = self._closed
            self._live += 1
            if not closed:
                queue.append(unit)
                self._lock.notify()
        if closed:
            self._end(unit, "closed")

    # ---- worker threads

    def _run(self) -> None:
        while True:
            unit, slot, expired = self._next()
            for late in expired:
                self._end(late, "late")
            if unit is None:
                if self._closed and self._live == 0:
                    return
                continue
            try:
                if slot is None:
                    self._land(unit)
                else:
                    unit.slot = slot
                    self._launch(unit)
            except Exception:
                log.exception("KV-MOVER: chunk %s", unit.name)
                if slot is not None and unit.flight is not None:
                    unit.flight.over()
                self._end(unit, "failed")

    def _next(self) -> tuple[Unit | None, Slot | None, list[Unit]]:
        """Work to do: a landed transfer, else a load, else a store that finds a slot; and what is overdue in the queues."""
        with self._lock:
            now = time.monotonic()
            expired = [u for q in (self._loads, self._stores) for u in q if now >= u.deadline]
            for unit in expired:
                (self._stores if unit.store else self._loads).remove(unit)
            if self._landed:
                return self._landed.popleft(), None, expired
            for queue, reserve in ((self._loads, 0), (self._stores, self._reserve)):
                if queue:
                    slot = self.pool.acquire(0.0, reserve)
                    if slot is not None:
                        return queue.popleft(), slot, expired
            if not expired:
                self._lock.wait(_TICK_S if self._loads or self._stores else 1.0)
            return None, None, expired

    def _launch(self, unit: Unit) -> None:
        slot = unit.slot
        assert slot is not None

        def landed(outcome: Outcome) -> None:
            unit.outcome = outcome
            if unit.flight is not None:
                if outcome is Outcome.LATE:
                    slot.over = unit.flight.over
                else:
                    unit.flight.over()
            with self._lock:
                self._landed.append(unit)
                self._lock.notify()

        if unit.store:
            name = parse_name(unit.name)
            assert name is not None
            if unit.flight is not None:  # before the guard: whoever raises the generation after it finds this put
                unit.flight.begin()
            if unit.guard is not None and not unit.guard():  # it has waited, perhaps across a purge
                if unit.flight is not None:
                    unit.flight.over()
                self._end(unit, "refused")
                return
            np.copyto(slot.array[HEADER_BYTES : HEADER_BYTES + unit.row.nbytes], unit.row)
            self.codec.seal(slot.view, name.tenant, name.namespace, bytes.fromhex(name.hash))
            unit.transport.write(unit.name, slot, self.codec.object_bytes, unit.deadline, landed)
        else:
            self._blank(slot)
            unit.transport.read(unit.name, slot, self.codec.object_bytes, unit.deadline, landed)

    def _blank(self, slot: Slot) -> None:
        """Head and tail: a short answer ends DONE and leaves what the slot held, perhaps this very object."""
        slot.array[:HEADER_BYTES] = 0
        slot.array[self.codec.object_bytes - _TAIL : self.codec.object_bytes] = 0xA5

    def _land(self, unit: Unit) -> None:
        outcome = unit.outcome
        if outcome is not Outcome.DONE:
            reason: Reason = "failed" if outcome is None else outcome.value  # type: ignore[assignment]
            if outcome is Outcome.LATE:
                unit.slot = None  # quarantined: the transport gives it back
            self._end(unit, reason)
        elif unit.store and unit.verify:
            unit.verify = False
            self._read_back(unit)
        elif unit.store:
            self._end(unit, "ok" if unit.guard is None or unit.guard() else "refused")
        else:
            self._end(unit, self._prove(unit))

    def _prove(self, unit: Unit) -> Reason:
        """The row is written only when every byte of the object is what its name promises."""
        doubt = None if self._skip_proof else self._doubt(unit)
        if doubt is not None:
            log.warning("KV-OBJECT-DOUBT: %s: %s; treated as a miss", unit.name, doubt)
            return doubt
        if unit.guard is not None and not unit.guard():
            return "refused"
        assert unit.slot is not None
        np.copyto(unit.row, unit.slot.array[HEADER_BYTES : HEADER_BYTES + unit.row.nbytes])
        return "ok"

    def _doubt(self, unit: Unit) -> Reason | None:
        name = parse_name(unit.name)
        assert name is not None and unit.slot is not None
        return self.codec.check(unit.slot.view, name.tenant, name.namespace, bytes.fromhex(name.hash))

    def _read_back(self, unit: Unit) -> None:
        """Is what we wrote what the store gives back? Into the same slot: the write is over."""
        slot = unit.slot
        assert slot is not None
        self._blank(slot)

        def landed(outcome: Outcome) -> None:
            if outcome is Outcome.LATE:
                unit.slot = None
                self._end(unit, "unverified")
            else:
                good = outcome is Outcome.DONE and self._doubt(unit) is None
                self._end(unit, "ok" if good and (unit.guard is None or unit.guard()) else "unverified")

        unit.transport.read(unit.name, slot, self.codec.object_bytes, unit.deadline, landed)

    def _end(self, unit: Unit, reason: Reason) -> None:
        with self._lock:
            if unit.over:
                return
            unit.over = True
        if unit.slot is not None:
            self.pool.release(unit.slot)
            unit.slot = None
        self.reasons[f"{'store' if unit.store else 'load'}_{reason}"] += 1
        try:
            unit.done(unit, reason)
        finally:
            with self._lock:
                self._live -= 1
                self._lock.notify_all()
