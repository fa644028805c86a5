"""Azure Blob behind the transfer contract, through NIXL's AZURE_BLOB plugin."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence

from components.common.transfer.agent import Agent
from components.common.transfer.base import Connection, Done, Known, Op, Transport
from components.common.transfer.breaker import Breaker
from components.common.transfer.pump import Lane, Pump
from components.common.transfer.queries import Queries
from components.common.transfer.staging import Slot, StagingPool

log = logging.getLogger(__name__)

PROBE_NAME = "dynamo-blob.probe"
_PROBE_S = 3.0
_CHECK_S = 2.0


class BlobLane(Lane):
    """One credential's life: an agent, its back end and the staging memory registered with it."""

    def __init__(self, connection: Connection, pool: StagingPool) -> None:
        self.expires = connection.expires
        self._agent = Agent("AZURE_BLOB", connection.params, pool)

    def start(self, op: Op) -> None:
        op.handle = self._agent.start(op.write, op.slot.address, op.nbytes, op.name)

    def state(self, op: Op) -> str:
        return self._agent.state(op.handle)

    def finish(self, op: Op) -> None:
        self._agent.finish(op.handle)

    def retire(self) -> None:
        self._agent.retire()


class BlobTransport(Transport):
    """One container.

    connect    returns fresh NIXL parameters (connection_string or account_url, container_name); called
               again when the last answer's `expires` has come. It must not block for long.
    container  raises when the container is missing or may not be reached: NIXL cannot tell a missing
               container from a miss. Called on a background thread after unexpected misses and failures.
    threads    requests in flight at most, in NIXL's own pool; the default of NIXL (cores/2) starves on real latency.
    """

    def __init__(
        self,
        pool: StagingPool,
        connect: Callable[[], Connection],
        *,
        threads: int = 16,
        container: Callable[[], None] | None = None,
        errors: int = 5,
        open_s: float = 1.0,
        max_open_s: float = 30.0,
        name: str = "blob",
    ) -> None:
        self.pool, self._connect, self._threads, self._container = pool, connect, threads, container
        self._read_breaker = Breaker(errors, open_s, max_open_s)
        self._write_breaker = Breaker(errors, open_s, max_open_s)
        self._query_expires: float | None = None
        self.container_ok = True
        self.container_why = ""
        self._check_due = 0.0
        self._queries = Queries(self._open_asker, self._asked, self._query_stale)
        self._pump = Pump(
            name, pool, self._open_lane, self._read_breaker, self._write_breaker, self._explain, self._tick
        )

    def read(self, name: str, slot: Slot, nbytes: int, deadline: float, done: Done) -> None:
        self._pump.submit(Op(False, name, slot, nbytes, deadline, done))

    def write(self, name: str, slot: Slot, nbytes: int, deadline: float, done: Done) -> None:
        self._pump.submit(Op(True, name, slot, nbytes, deadline, done))

    def exists(self, names: Sequence[str], deadline: float, known: Known) -> None:
        if self._read_breaker.open:
            known(dict.fromkeys(names))
            return

        def answer(found: dict[str, bool | None]) -> None:
            values = set(found.values())
            if False in values and True not in values and not self._told_apart():
                found = dict.fromkeys(names)
            known(found)

        self._queries.ask(names, deadline, answer)

    def available(self, write: bool) -> bool:
        return not (self._write_breaker if write else self._read_breaker).open

    def stats(self) -> dict[str, float]:
        pump, queries = self._pump, self._queries
        return {
            **{f"{k}_total": float(v) for k, v in pump.counts.items()},
            **{f"{k}_seconds_total": float(v) for k, v in pump.seconds.items()},
            **{f"{k}_bytes_total": float(v) for k, v in pump.bytes.items()},
            **{f"query_{k}_total": float(v) for k, v in queries.counts.items()},
            "in_flight": float(pump.in_flight),
            "lanes": float(pump.lanes),
            "queries_stuck": float(queries.stuck),
            "staging_quarantined": float(self.pool.quarantined),
            "staging_used": float(self.pool.used),
            "read_breaker_open": float(self._read_breaker.open),
            "write_breaker_open": float(self._write_breaker.open),
            "breaker_opened_total": float(self._read_breaker.opened + self._write_breaker.opened),
            "container_ok": float(self.container_ok),
        }

    def close(self, drain_s: float) -> bool:
        end = time.monotonic() + drain_s
        drained = self._pump.close(drain_s)  # first: a failed read is explained by a question
        return self._queries.close(max(0.1, end - time.monotonic())) and drained

    # ---- connections

    def _parameters(self) -> Connection:
        connection = self._connect()
        return Connection({"num_threads": str(self._threads), **connection.params}, connection.expires)

    def _open_lane(self) -> BlobLane:
        return BlobLane(self._parameters(), self.pool)

    def _open_asker(self) -> Agent:
        connection = self._parameters()
        self._query_expires = connection.expires
        return Agent("AZURE_BLOB", {**connection.params, "num_threads": "8"}, None)

    def _query_stale(self) -> bool:
        return self._query_expires is not None and time.time() >= self._query_expires

    # ---- outages

    def _explain(self, name: str, deadline: float, answer: Callable[[bool | None], None]) -> None:
        """After a failed read: is the object missing, or is the store (or the container) in trouble?"""

        def known(found: dict[str, bool | None]) -> None:
            answer(found[name] if found[name] is not False or self._told_apart() else None)

        self._queries.ask([name], min(deadline, time.monotonic() + _PROBE_S), known, counts=False)

    def _told_apart(self) -> bool:
        """True when "no such object" may be believed: NIXL says the same of a missing container. Checked at most every `_CHECK_S`."""
        now = time.monotonic()
        if now >= self._check_due:
            self._check_due = now + _CHECK_S
            self._container_there()
        return self.container_ok

    def _asked(self, good: bool) -> None:
        (self._read_breaker.good if good else self._read_breaker.bad)()

    def _tick(self) -> None:
        """On the pump's thread: probe for open breakers; a user's request never pays for it."""
        for breaker in (self._read_breaker, self._write_breaker):
            if breaker.due():
                self._probe(breaker)

    def _probe(self, breaker: Breaker) -> None:
        """A store that answers about one name (there or not) and whose container is there is back."""

        def known(found: dict[str, bool | None]) -> None:
            breaker.probed(found[PROBE_NAME] is not None and self._container_there())

        self._queries.ask([PROBE_NAME], time.monotonic() + _PROBE_S, known, counts=False)

    def _container_there(self) -> bool:
        if self._container is None:
            return True
        try:
            self._container()
            self.container_ok, self.container_why = True, ""
        except Exception as e:
            if self.container_ok:
                log.warning("the container is not usable: %s", e)
            self.container_ok, self.container_why = False, str(e)
        return self.container_ok


def leave_at_exit(transport: Transport) -> None:
    """For worker processes: transfers in flight would hold up process exit for minutes inside NIXL, and a question in flight
    would abort it (a thread of the Azure SDK outlives what it uses).

    At exit, when some are left after half a second, the process leaves without running destructors.
    """

    def leave() -> None:
        if not transport.close(0.5):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    atexit.register(leave)
