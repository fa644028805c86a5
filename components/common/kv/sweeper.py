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
from pathlib import Path

import numpy as np

from components.common.errors import DynamoBlobError
from components.common.kv.catalogue import Catalogue, Entry, fragment
from components.common.kv.classes import Classes
from components.common.kv.containers import sweep_retired
from components.common.kv.epochs import generation_of
from components.common.kv.journal import JournalReader, snapshot
from components.common.kv.keys import parse_name
from components.common.kv.reload import Watched
from components.common.kv.retention import Policy, ReuseModel, Worth, verdict
from components.common.kv.snapshot import decode
from components.common.kv.store import SNAPSHOT_OBJECT, KvStore, Lease
from components.common.kv.sweeper_config import SweeperConfig
from components.common.kv.sweeper_ops import Ops, State
from components.common.storage.account import Account
from components.common.storage.errors import StorageError

log = logging.getLogger(__name__)
_BATCH = 256  # deletions between two looks at the lease
_RETRY_S = 5.0  # seconds to the next turn after one that failed


class Sweeper:
    """One sweeper. `run_once` is a whole sweep, or nothing when somebody else holds the lease."""

    def __init__(
        self, config: SweeperConfig, store: KvStore, classes: Classes, *, policy: Policy | None = None
    ) -> None:
        self.config, self.store, self.classes = config, store, classes
        self._reuse = ReuseModel()
        self._policy = policy or Worth(self._reuse)
        self._clock = time.time
        self.lease = Lease(store, config.lease_s)
        self.counters: Counter[str] = Counter()
        self.seconds = 0.0
        self._forget()

    @property
    def leading(self) -> bool:
        return self._leading

    def values(self) -> dict[str, float]:
        """Counters and gauges, for /metrics."""
        return {
            "objects": float(len(self.catalogue)), "bytes": float(self.catalogue.bytes), "leading": float(self._leading),
            "sweep_seconds": self.seconds, **{f"requests_{k}": float(n) for k, n in self.store.requests.items()},
            **{k: float(n) for k, n in self.counters.items()},
        }  # fmt: skip

    def _forget(self) -> None:
        """What was known is out of date: somebody else swept meanwhile."""
        self.catalogue = Catalogue(self.config.capacity, reuse=self._reuse, clock=self._clock)
        self.reader = JournalReader(self.store, self.catalogue)
        self._listed_at = self._swept_at = 0.0
        self._based = self._leading = False

    def reclass(self, classes: Classes) -> None:
        """The tenants file changed. The next sweep lists first: what is where is asked anew."""
        self.classes, self._listed_at = classes, 0.0

    def run_once(self) -> bool:
        """One sweep; False when standing by. Raises StorageError when the store does not answer."""
        if not self.lease.acquire():
            self.counters["standby"] += 1
            if self._leading:
                self._forget()
            return False
        begun = time.monotonic()
        self._leading = True
        self._base()
        self.reader.read()
        if self._clock() - self._listed_at >= self.config.relist_s:
            if not sweep_retired(self.store, self.classes, self._delete, self._clock(), self.config.most_deletes):
                return False
            self.relist()
        if not self._late():
            return False
        now = self._clock()
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
        if not all(self._delete(c, names) for c, names in by_container.items()):
            return False
        self._publish()
        self.counters["sweeps"] += 1
        self.seconds = time.monotonic() - begun
        self._status(self.seconds)
        return True

    def relist(self) -> None:
        """Bring the catalogue in line with what the containers hold, in both directions."""
        begun = self._clock()
        seen = array("Q")
        owner: dict[str, list[str]] = {}
        for cls, container in self.classes.containers().items():
            owner.setdefault(container, []).append(cls)
        owner.setdefault(self.config.container, [self.classes.default])
        for container, names in owner.items():
            cls = self.classes.default if self.classes.default in names else sorted(names)[0]
            for info in self.store.list(container):
                if parse_name(info.name) is None:
                    continue
                seen.append(fragment(info.name))
                at = int(info.modified)
                known = self.catalogue.get(info.name)
                self.catalogue.add(
                    known._replace(nbytes=info.size) if known else Entry(info.name, info.size, cls, at, at, 0, 0.0, 0)
                )
            self.lease.keep()
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
        raw, _ = self.store.read(SNAPSHOT_OBJECT)
        found = decode(raw) if raw else None
        if found is not None:
            for entry in found.entries:
                self.catalogue.add(entry)
            self.reader.offsets.update(found.offsets)
        self._based = True

    def _late(self) -> bool:
        """Delete objects of any generation but the current one: puts that landed after their purge. False = lease lost.

        The generations are read after the names: no name here can be newer than they are.
        """
        generations = self.store.read_epochs()
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
                self.counters["lease_lost"] += 1
                return False
            batch = dict(names[at : at + _BATCH])
            done = self.store.delete(container, batch)
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

    def _publish(self) -> None:
        if self.lease.keep():
            self.store.write(SNAPSHOT_OBJECT, snapshot(self.catalogue, self.reader, complete=self._listed_at > 0))
            self.store.delete(self.store.control, self.reader.consumed(self._clock() - self.config.journal_keep_s))

    def _status(self, seconds: float) -> None:
        if self.config.status_file:
            body = {
                "at": self._clock(), "seconds": seconds, "objects": len(self.catalogue), "bytes": self.catalogue.bytes,
                "requests": self.store.requests, "catalogue": self.catalogue.counters, **self.counters,
            }  # fmt: skip
            path = Path(self.config.status_file)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text(json.dumps(body, sort_keys=True))
            os.replace(temporary, path)


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
            except StorageError as e:
                sweeper.counters["failures"] += 1
                log.warning("KV-SWEEP-FAILED: %s", e)
                why = f"{e.code}: {e.what}"
            state.turn(why, sweeper.values())
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
