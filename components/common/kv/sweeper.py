"""The sweeper: deletes what is over, what is worth least beyond the budgets, and what a purge outran.

``python -m components.common.kv.sweeper --plan FILE`` (FILE = JSON of `SweeperConfig`); any number may run,
the one that holds the lease works, the others stand by. It reads the workers' journals, lists the
containers now and then (the truth about existence), ranks by `retention.Worth`, deletes, and writes the
snapshot that workers start from. It deletes nothing that parses as no object of ours.

With `listen` it answers /health (ready = its last turn reached the store, leading or standing by), /live and /metrics.

Exit codes: 0 after SIGTERM, 2 configuration, 1 anything else.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path

import numpy as np

from components.common.errors import DynamoBlobError
from components.common.kv.catalogue import SKEW_S, Catalogue, fragment
from components.common.kv.classes import Classes
from components.common.kv.containers import sweep_retired
from components.common.kv.epochs import generation_of
from components.common.kv.fence import forget_ended
from components.common.kv.generations import reconcile
from components.common.kv.journal import JournalReader, snapshot
from components.common.kv.keys import parse_name
from components.common.kv.publishing import Publisher
from components.common.kv.reload import Watched
from components.common.kv.retention import Policy, ReuseModel, Worth, verdict
from components.common.kv.snapshot import decode
from components.common.kv.store import LOCK_OBJECT, KvStore, Lease
from components.common.kv.sweeper_config import SweeperConfig
from components.common.kv.sweeper_ops import Ops, State
from components.common.storage.account import Account
from components.common.storage.errors import StorageError

log = logging.getLogger(__name__)
_BATCH = 256  # deletions between two looks at the lease
_CLOCK_S = 3.0  # a difference of clocks that is none: dates of answers are whole seconds
_RETRY_S = 5.0  # seconds to the next turn after one that failed


class Sweeper:
    """One sweeper. `run_once` is a whole sweep, or nothing when somebody else holds the lease."""

    def __init__(
        self, config: SweeperConfig, store: KvStore, classes: Classes, *, policy: Policy | None = None
    ) -> None:
        self.config, self.store, self.classes = config, store, classes
        self._reuse = ReuseModel()
        self._policy = policy or Worth(self._reuse)
        self._clock = self._wall = time.time
        self._skew = 0.0
        self.lease = Lease(store, config.lease_s)
        self.snapshot = Publisher(store, self.lease)
        self.counters: Counter[str] = Counter()
        self.problems: dict[str, str] = {}
        """What does not work while the rest goes on: {generations, retired, snapshot, status: why}."""
        self.seconds = 0.0
        self._forget()

    @property
    def leading(self) -> bool:
        return self._leading

    def values(self) -> dict[str, float]:
        """Counters and gauges, for /metrics."""
        return {
            "objects": float(len(self.catalogue)), "bytes": float(self.catalogue.bytes), "leading": float(self._leading),
            "sweep_seconds": self.seconds, "generations_unknown": float("generations" in self.problems),
            "clock_skew_seconds": self._skew, "journal_bad_lines": float(self.reader.bad_lines),
            **{f"requests_{k}": float(n) for k, n in self.store.requests.items()},
            **{k: float(n) for k, n in self.counters.items()},
        }  # fmt: skip

    def _now(self) -> float:
        """The store's clock, which dates the objects."""
        return self._clock() + self._skew

    def _forget(self) -> None:
        """What was known is out of date: somebody else swept meanwhile."""
        self.catalogue = Catalogue(self.config.capacity, reuse=self._reuse, clock=self._now)
        self.reader = JournalReader(self.store, self.catalogue)
        self._listed_at = self._swept_at = 0.0
        self._based = self._leading = False

    def reclass(self, classes: Classes) -> None:
        """The tenants file changed. The next sweep lists first: what is where is asked anew."""
        self.classes, self._listed_at = classes, 0.0

    def start_over(self) -> None:
        """Forget everything; the next turn lists."""
        self._forget()

    def run_once(self) -> bool:
        """One sweep; False when standing by. Raises StorageError when the store does not answer."""
        if not self.lease.acquire():
            self.counters["standby"] += 1
            if self._leading:
                self._forget()
            return False
        begun = time.monotonic()
        self._leading = True
        self._skew = clock_skew(self.store, self._wall, self._skew)
        self._base()
        self.reader.read()
        if self._now() - self._listed_at >= self.config.relist_s:
            mine, why = sweep_retired(
                self.store, self.classes, self._delete, self._now(), self.config.most_deletes, self.lease.keep
            )
            if not mine:
                return self._lost()
            self._problem("retired", why)
            self.relist()
            forget_ended(self.store, self._now(), lambda: self.lease.held)
        if not self._late():
            return self._lost()
        now = self._now()
        rows = self.catalogue.columns()
        if self._swept_at:
            self._reuse.expose(rows, now, self._swept_at)
        self._swept_at = now
        doomed = verdict(
            rows,
            self.classes,
            self._policy,
            now,
            total_bytes=self.config.total_bytes or None,
            most=self.config.most_deletes,
        )
        by_container: dict[str, list[tuple[str, str]]] = {}
        for i, reason in zip(doomed.rows.tolist(), doomed.reasons, strict=True):
            container = self.classes.container(rows.classes[rows.cls[i]]) or self.config.container
            by_container.setdefault(container, []).append((rows.name(i), reason))
        if not all(self._delete(c, names) for c, names in by_container.items()) or not self._publish():
            return self._lost()
        self.counters["sweeps"] += 1
        self.seconds = time.monotonic() - begun
        self._status(self.seconds)
        return True

    def relist(self) -> None:
        """Bring the catalogue in line with what the containers hold, in both directions."""
        begun = self._now()
        seen = array("Q")
        owner: dict[str, list[str]] = {}
        for cls, container in self.classes.containers().items():
            owner.setdefault(container, []).append(cls)
        owner.setdefault(self.config.container, [self.classes.default])
        for container, names in owner.items():
            cls = self.classes.default if self.classes.default in names else sorted(names)[0]
            for info in self.store.each(container, self.lease.keep):
                if parse_name(info.name) is None:
                    continue
                seen.append(fragment(info.name))
                self.catalogue.found(info.name, info.size, cls, info.modified)
        rows = self.catalogue.columns()
        mine = np.ascontiguousarray(rows.key[:, :8]).view(">u8").ravel().astype(np.uint64)
        gone = ~np.isin(mine, np.frombuffer(seen, np.uint64)) & (rows.created < begun - 1)
        for i in np.nonzero(gone)[0].tolist():
            self.catalogue.note_gone(rows.name(i), "absent")
        self._listed_at = begun
        self.counters["listings"] += 1

    def close(self) -> None:
        self.lease.release()

    def _base(self) -> None:
        if self._based:
            return
        raw = self.snapshot.base()
        found = decode(raw) if raw else None
        if found is not None:
            for entry in found.entries:
                self.catalogue.add(entry)
            self.reader.offsets.update(found.offsets)
        self._based = True

    def _problem(self, what: str, why: str) -> None:
        self.problems.pop(what, None)
        if why:
            self.problems[what] = why

    def _lost(self) -> bool:
        """The lease went during a sweep: another may sweep from now on, so what is known here is out of date."""
        self.counters["lease_lost"] += 1
        self._forget()
        return False

    def _late(self) -> bool:
        """Delete objects of any generation but the current one: puts that landed after their purge. False = lease lost.

        The generations are read after the names: no name here can be newer than they are. While they cannot be known
        nobody uses the tier, and nothing is late.
        """
        try:
            generations = reconcile(self.store)
        except StorageError:
            raise
        except DynamoBlobError as e:
            if "generations" not in self.problems:
                log.error("KV-SWEEP-GENERATIONS: purged objects are not swept, the rest is: %s", e)
            self.problems["generations"] = f"{e.code}: {e.why}"
            return True
        self.problems.pop("generations", None)
        late: dict[str, list[tuple[str, str]]] = {}
        for prefix in self.catalogue.prefixes():
            tenant, namespace = prefix.split("/")
            if generation_of(namespace) != generations.get(tenant, 0):
                for e in self.catalogue.entries(prefix + "/"):
                    late.setdefault(self.classes.container(e.cls) or self.config.container, []).append(
                        (e.name, "purged")
                    )
        return all(self._delete(c, names) for c, names in late.items())

    def _delete(self, container: str, names: list[tuple[str, str]]) -> bool:
        """Delete in batches, each only while the lease is ours. False = lease lost, the rest is another's."""
        for at in range(0, len(names), _BATCH):
            if not self.lease.keep():
                return False
            batch = dict(names[at : at + _BATCH])
            done = self.store.delete(container, batch, lambda: self.lease.held)
            for name in done.deleted:
                known = self.catalogue.get(name)
                self.counters["deleted_bytes"] += known.nbytes if known else 0
                self.counters[f"deleted_{batch[name]}"] += 1
            for name in (*done.deleted, *done.missing):  # missing: a purge or another sweeper was first, and counts it
                self.catalogue.note_gone(name, batch[name])
            self.counters["delete_failed"] += len(done.failed)
            if done.failed:
                name, why = next(iter(done.failed.items()))
                log.warning(
                    "KV-SWEEP-DELETE: %d of %d not deleted, e.g. %s: %s", len(done.failed), len(batch), name, why
                )
        return True

    def _publish(self) -> bool:
        """The snapshot, and then no journals that it covers. False = lease lost."""
        if not self.snapshot.write(snapshot(self.catalogue, self.reader, complete=self._listed_at > 0)):
            return False
        if self.snapshot.problem:
            self.problems["snapshot"] = self.snapshot.problem
            return True
        self.problems.pop("snapshot", None)
        old = self.reader.consumed(self._now() - self.config.journal_keep_s)
        self.store.delete(self.store.control, old, lambda: self.lease.held)
        return True

    def _status(self, seconds: float) -> None:
        if not self.config.status_file:
            return
        body = {
            "at": self._now(), "seconds": seconds, "objects": len(self.catalogue), "bytes": self.catalogue.bytes,
            "requests": self.store.requests, "catalogue": self.catalogue.counters, "problems": self.problems,
            "journal": {"records": self.reader.records, "bad_lines": self.reader.bad_lines, "redated": self.reader.redated},
            "clock_skew_s": self._skew, **self.counters,
        }  # fmt: skip
        path = Path(self.config.status_file)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(body, sort_keys=True))
            os.replace(temporary, path)
            self.problems.pop("status", None)
        except OSError as e:  # a full disk must not end sweeping
            log.warning("KV-SWEEP-STATUS: %s cannot be written: %s", path, e)
            self.problems["status"] = f"{path}: {e.strerror}"


def run(config: SweeperConfig, stop: threading.Event) -> None:
    """Sweep until `stop`. An outage is logged, shown by /health and tried again at the next turn."""
    state = State()
    ops = _listen(config, state)
    account = Account(config.account)
    store = KvStore(account, config.container)
    try:
        watched = Watched(config.tenants_file, config.container)
        sweeper = Sweeper(config, store, watched.classes)
        while not stop.is_set():
            why = ""
            if watched.look():
                sweeper.reclass(watched.classes)
            sweeper.counters["tenants_file_bad"] = int(bool(watched.problem))
            try:
                sweeper.run_once()
            except DynamoBlobError as e:
                log.warning("KV-SWEEP-FAILED: %s", e)
                why = f"{e.code}: {e.what}"
            except Exception as e:  # a fault of ours: told, and the next turn begins from what the store says
                log.exception("KV-SWEEP-FAULT: this turn was given up")
                why = f"KV-SWEEP-FAULT: {type(e).__name__}: {e}"[:300]
                sweeper.start_over()
            sweeper.counters["failures"] += bool(why)
            state.turn(why, sweeper.values(), sweeper.problems)
            next_sweep = time.monotonic() + (min(config.sweep_s, _RETRY_S) if why else config.sweep_s)
            while not stop.wait(min(config.lease_s / 3, max(0.01, next_sweep - time.monotonic()))):
                if time.monotonic() >= next_sweep or not _kept(sweeper.lease):
                    break
        sweeper.close()
    finally:
        if ops is not None:
            ops.close()
        store.close()
        account.close()


def clock_skew(store: KvStore, clock: Callable[[], float], before: float = 0.0) -> float:
    """Seconds the store's clock is ahead of `clock`, by the Date of an answer; 0 within what a request takes.

    `before`: what it was, for when no Date comes back. Raises StorageError.
    """
    dates: list[str] = []
    with store.account.errors(store.control, LOCK_OBJECT):
        asked = clock()
        store.account.blob(store.control, LOCK_OBJECT).get_blob_properties(
            raw_response_hook=lambda r: dates.append(r.http_response.headers.get("Date", ""))
        )
    store.requests["read"] += 1
    try:
        skew = parsedate_to_datetime(dates[-1]).timestamp() + 0.5 - (asked + clock()) / 2
    except (ValueError, TypeError, IndexError):
        return before
    if abs(skew) > SKEW_S and abs(before) <= SKEW_S:
        log.warning("KV-SWEEP-CLOCK: our clock is %.0f s off the store's; the store's counts", -skew)
    return skew if abs(skew) > _CLOCK_S else 0.0


def _listen(config: SweeperConfig, state: State) -> Ops | None:
    try:
        return Ops(config.listen, state) if config.listen else None
    except OSError as e:
        raise DynamoBlobError(
            "SWEEPER-LISTEN", f"the sweeper cannot listen on {config.listen}", where="listen", why=str(e),
            do="free the port, or move network.base_port",
        ) from None  # fmt: skip


def _kept(lease: Lease) -> bool:
    """Renew between sweeps; an outage shows at the next sweep."""
    try:
        return lease.keep()
    except StorageError:
        return False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m components.common.kv.sweeper", description="Sweeps the KV containers"
    )
    parser.add_argument("--plan", required=True, help="JSON of SweeperConfig")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("azure").setLevel(logging.WARNING)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        run(SweeperConfig.read(args.plan), stop)
    except DynamoBlobError as e:
        print(e, file=sys.stderr)
        return 2 if e.code.startswith(("CONFIG-", "TENANTS-")) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
