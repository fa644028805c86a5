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
from components.common.transfer.base import Done, Outcome, Transport
from components.common.transfer.staging import Slot, StagingPool

log = logging.getLogger(__name__)

Reason = Literal[
    "ok", "missing", "failed", "late", "refused", "queue_full", "closed",
    "format", "length", "tenant", "namespace", "key", "digest", "unverified",
]  # fmt: skip
"""How a chunk ended. Everything but "ok" is a miss (load) or an object that is not indexed (store)."""

_TICK_S = 0.05
_TAIL = 64
_HAND_S = 2.0
"""Longest wait at close for a copy that a thread has begun (milliseconds of work)."""
_NO_ROW: np.ndarray[Any, Any] = np.empty(0, np.uint8)


@dataclass(slots=True, eq=False)
class Unit:
    """One chunk on its way. `row` is its row in DRAM (uint8); the unit lets go of it when it ends, because a transport
    may hold the unit for minutes more and the DRAM tier cannot be unmapped under a view.

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
    read_back: bool = False
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
        self._flying: set[Unit] = set()
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
        """Queued chunks end as "closed" at once; those in the store's hands too, `timeout` seconds later. True when all have ended.

        NIXL cannot cancel: a transfer that was given up goes on between store and staging slot, which is never freed.
        """
        with self._lock:
            self._closed = True
            waiting = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._lock.notify_all()
        for unit in waiting:
            self._end(unit, "closed")
        if not self.drain(timeout):
            self._give_up()
        ended = self.drain(_HAND_S)
        for thread in self._threads:
            thread.join(1.0)
        return ended

    def _give_up(self) -> None:
        with self._lock:
            flying = list(self._flying)
            self._flying.clear()
            for unit in flying:
                unit.over, unit.slot = True, None  # the slot is the transfer's until it lands
        if flying:
            log.warning("KV-SHUTDOWN: %d chunks that the store still has in hand are given up", len(flying))
        for unit in flying:
            self._ended(unit, "closed")

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
            unit.transport.write(unit.name, slot, self.codec.object_bytes, unit.deadline, self._landing(unit))
        else:
            self._read(unit, slot)

    def _read(self, unit: Unit, slot: Slot) -> None:
        self._blank(slot)
        unit.transport.read(unit.name, slot, self.codec.object_bytes, unit.deadline, self._landing(unit))

    def _landing(self, unit: Unit) -> Done:
        """What the transport calls when its transfer of `unit` is over. From here on nobody needs the row until it lands."""
        slot, flight = unit.slot, None if unit.read_back else unit.flight
        assert slot is not None

        def landed(outcome: Outcome) -> None:
            if flight is not None:
                if outcome is Outcome.LATE:
                    slot.over = flight.over
                else:
                    flight.over()
            with self._lock:
                given_up = unit.over
                self._flying.discard(unit)
                if not given_up:
                    unit.outcome = outcome
                    self._landed.append(unit)
                    self._lock.notify()
            if given_up and outcome is not Outcome.LATE:
                self.pool.release(slot)

        with self._lock:
            self._flying.add(unit)
        return landed

    def _blank(self, slot: Slot) -> None:
        """Head and tail: a short answer ends DONE and leaves what the slot held, perhaps this very object."""
        slot.array[:HEADER_BYTES] = 0
        slot.array[self.codec.object_bytes - _TAIL : self.codec.object_bytes] = 0xA5

    def _land(self, unit: Unit) -> None:
        outcome = unit.outcome
        if outcome is Outcome.LATE:
            unit.slot = None  # quarantined: the transport gives it back
        if unit.read_back:
            good = outcome is Outcome.DONE and self._doubt(unit) is None
            self._end(unit, "ok" if good and (unit.guard is None or unit.guard()) else "unverified")
        elif outcome is not Outcome.DONE:
            self._end(unit, "failed" if outcome is None else outcome.value)  # type: ignore[arg-type]
        elif unit.store and unit.verify and self._closed:
            self._end(unit, "closed")  # nothing new is begun: nobody would give it up any more
        elif unit.store and unit.verify:
            unit.read_back = True  # is what we wrote what the store gives back? Into the same slot: the write is over
            assert unit.slot is not None
            self._read(unit, unit.slot)
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

    def _end(self, unit: Unit, reason: Reason) -> None:
        with self._lock:
            if unit.over:
                return
            unit.over = True
            self._flying.discard(unit)
        self._ended(unit, reason)

    def _ended(self, unit: Unit, reason: Reason) -> None:
        unit.row = _NO_ROW
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
