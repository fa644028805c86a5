"""The thread that drives transfers: starts, polls, ends them, and keeps deadlines NIXL does not have.

A back end supplies a `Lane` (how one operation is started, polled, ended). When credentials are about
to expire, or every transfer of a lane is overdue, the pump opens a new lane and drains the old one:
NIXL can neither change credentials nor cancel.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable

from components.common.transfer.base import Op, Outcome
from components.common.transfer.breaker import Breaker
from components.common.transfer.staging import StagingPool

log = logging.getLogger(__name__)

_POLL_S = 0.0005
_IDLE_S = 0.25
_MAX_LANES = 4


class Lane(ABC):
    """One generation of a back end; used by the pump's thread only."""

    expires: float | None = None

    @abstractmethod
    def start(self, op: Op) -> None:
        """Begin; sets op.handle. Raises FileNotFoundError when the object is known to be missing, else any error."""

    @abstractmethod
    def state(self, op: Op) -> str:
        """PROC, DONE, ERR or MISSING."""

    @abstractmethod
    def finish(self, op: Op) -> None:
        """Clean up after a terminal state; for a write that ended DONE it also makes the object visible."""

    @abstractmethod
    def retire(self) -> None:
        """No transfer is left: drop it."""


class Pump:
    """open_lane() opens a generation (may raise: counted as a failure, tried again by the next operation).

    `explain(name)` is asked after a failed read: True = exists (so it failed), False = missing, None = unknown.
    """

    def __init__(
        self,
        name: str,
        pool: StagingPool,
        open_lane: Callable[[], Lane],
        read_breaker: Breaker,
        write_breaker: Breaker,
        explain: Callable[[str, float, Callable[[bool | None], None]], None],
        tick: Callable[[], None],
    ) -> None:
        self.pool, self._open_lane, self._explain, self._tick = pool, open_lane, explain, tick
        self._breakers = {False: read_breaker, True: write_breaker}
        self._inbox: queue.SimpleQueue[Op | None] = queue.SimpleQueue()
        self._lanes: list[tuple[Lane, list[Op]]] = []
        self._closed = threading.Event()
        self._drained = threading.Event()
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {"read": 0.0, "write": 0.0}
        self.bytes: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"transfer-{name}", daemon=True)
        self._thread.start()

    def submit(self, op: Op) -> None:
        if self._closed.is_set() or self._breakers[op.write].open:
            self.counts["refused"] += 1
            op.done(Outcome.REFUSED)
            return
        op.started = time.monotonic()
        self._inbox.put(op)

    @property
    def in_flight(self) -> int:
        return sum(len(ops) for _, ops in self._lanes)

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    def close(self, drain_s: float) -> bool:
        self._closed.set()
        self._inbox.put(None)  # it may be waiting for work
        self._drained.wait(drain_s)
        return self._drained.is_set()

    # ---- the pump's thread

    def _run(self) -> None:
        with contextlib.suppress(
            Exception
        ):  # the first request should not pay for a back end; errors show when one does
            self._lane()
        while True:
            busy = self._take(block=not self.in_flight)
            for lane, ops in self._lanes:
                for op in list(ops):
                    busy |= self._advance(lane, ops, op)
            self._retire_old()
            self._tick()
            if self._closed.is_set() and not self.in_flight and self._inbox.empty():
                break
            if not busy and self.in_flight:
                time.sleep(_POLL_S)
        for lane, _ in self._lanes:
            lane.retire()
        self._lanes.clear()
        self._drained.set()

    def _take(self, block: bool) -> bool:
        busy = False
        while True:
            try:
                op = self._inbox.get(timeout=_IDLE_S) if block and not busy else self._inbox.get_nowait()
            except queue.Empty:
                return busy
            busy = True
            if op is not None:
                self._start(op)

    def _start(self, op: Op) -> None:
        if time.monotonic() >= op.deadline:  # waited too long for this thread: nothing was started
            self._report(op, Outcome.FAILED, "expired")
            return
        try:
            lane, ops = self._lane()
            lane.start(op)
        except FileNotFoundError:
            self._report(op, Outcome.MISSING)
            return
        except Exception as e:
            log.warning("transfer of %s was not started: %s", op.name, e)
            self._report(op, Outcome.FAILED, "start")
            return
        ops.append(op)

    def _lane(self) -> tuple[Lane, list[Op]]:
        if self._lanes:
            lane, ops = self._lanes[-1]
            stale = lane.expires is not None and time.time() >= lane.expires
            stuck = len(ops) > 0 and all(op.reported for op in ops)
            if not stale and not (stuck and len(self._lanes) < _MAX_LANES):
                return self._lanes[-1]
            self.counts["renewed" if stale else "replaced"] += 1
        self._lanes.append((self._open_lane(), []))
        return self._lanes[-1]

    def _advance(self, lane: Lane, ops: list[Op], op: Op) -> bool:
        state = lane.state(op)
        if state == "PROC":
            if not op.reported and time.monotonic() >= op.deadline:
                self.pool.quarantine(op.slot)
                self._report(op, Outcome.LATE)
                return True
            return False
        ops.remove(op)
        try:
            lane.finish(op)
        except Exception as e:
            log.warning("transfer of %s did not end well: %s", op.name, e)
            state = "ERR"
        if op.reported:  # overdue and now over: its memory is safe again
            self.counts["late_ended"] += 1
            self.pool.cleared(op.slot)
        elif state == "DONE":
            self._report(op, Outcome.DONE)
        elif state == "MISSING":
            self._report(op, Outcome.MISSING)
        elif op.write:
            self._report(op, Outcome.FAILED)
        else:
            self._ask(op)
        return True

    def _ask(self, op: Op) -> None:
        """NIXL says only "error": a missing object is a miss, anything else a failure that counts."""

        def answer(exists: bool | None) -> None:
            self._report(op, Outcome.MISSING if exists is False else Outcome.FAILED)

        self._explain(op.name, op.deadline, answer)

    def _report(self, op: Op, outcome: Outcome, why: str = "") -> None:
        op.reported = True
        way = "write" if op.write else "read"
        self.counts[f"{way}_{outcome}"] += 1
        if why:
            self.counts[f"{way}_{why}"] += 1
        self.seconds[way] += time.monotonic() - op.started
        if outcome is Outcome.DONE:
            self.bytes[way] += op.nbytes
        breaker = self._breakers[op.write]
        if outcome in (Outcome.FAILED, Outcome.LATE):
            breaker.bad()
        else:
            breaker.good()
        try:
            op.done(outcome)
        except Exception:
            log.exception("the end of the transfer of %s could not be reported", op.name)

    def _retire_old(self) -> None:
        for entry in [e for e in self._lanes[:-1] if not e[1]]:
            self._lanes.remove(entry)
            entry[0].retire()
