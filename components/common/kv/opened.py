"""One secondary tier, opened: staging pool, a transport per container, index, purge generations."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.kv.classes import Classes, home_of
from components.common.kv.config import KvTiersConfig
from components.common.kv.containers import remember
from components.common.kv.directory import DirectoryIndex, Owners, Upkeep
from components.common.kv.epochs import Epochs
from components.common.kv.fence import Fence, Flight
from components.common.kv.index import Index
from components.common.kv.journal import SharedIndex
from components.common.kv.keys import Namespace
from components.common.kv.objects import HEADER_BYTES
from components.common.kv.reload import Follower, Watched
from components.common.kv.store import KvStore
from components.common.kv.stores import (
    BlobNotes,
    DirectoryNotes,
    Notes,
    Others,
    blob_transport,
    mac_key,
    posix_transport,
)
from components.common.messages.announce import Listener
from components.common.storage.account import Account
from components.common.transfer.base import Transport
from components.common.transfer.nixl_blob import leave_at_exit
from components.common.transfer.staging import StagingPool

log = logging.getLogger(__name__)

MIN_SLOTS = 4
_CATALOGUE = 1 << 18
"""Objects the worker's index knows at most: 18 MiB."""


@dataclass
class Opened:
    pool: StagingPool
    transports: dict[str, Transport]
    classes: Classes
    """Those of now: replaced as a whole when the tenants file changes."""
    directory: bool = False
    """Everything goes to the one transport "dir"."""
    follower: Follower | None = None
    epochs: Epochs | None = None
    index: Index | None = None
    mac_key: bytes | None = None
    note: Others | None = None
    listener: Listener | None = None
    fence: Fence | None = None
    upkeep: Upkeep | None = None
    closers: list[Callable[[], object]] = field(default_factory=list)
    _closed: bool = False

    @property
    def default_class(self) -> str:
        return self.classes.default

    @property
    def problem(self) -> str:
        """Why the tenants file is not in force as it stands; empty when it is."""
        return self.follower.problem if self.follower else ""

    def container_of(self, cls: str) -> str:
        """Container (or "dir") of a retention class; empty = KV of this class stays in HBM and DRAM."""
        if self.directory:
            return "" if self.classes.get(cls).ephemeral else "dir"
        return self.classes.container(cls)

    def transport(self, cls: str) -> Transport | None:
        return self.transports.get(self.container_of(cls))

    def scope(self, tenant: str, namespace: str) -> str | None:
        return namespace if self.epochs is None else self.epochs.scope(tenant, namespace)

    def current(self, tenant: str, namespace: str) -> bool:
        return self.epochs is None or self.epochs.current(tenant, namespace)

    def flight(self, transport: Transport, name: str) -> Flight | None:
        """Follows one put, so that a purge can ask for it; None where purges do not ask."""
        if self.fence is None:
            return None
        return self.fence.flight(next(c for c, t in self.transports.items() if t is transport), name)

    def others(self) -> list[dict[str, Any]]:
        return list(self.note.found) if self.note else []

    def stats(self) -> dict[str, float]:
        out: dict[str, float] = {"staging_slots": float(self.pool.count), "staging_bytes": float(self.pool.nbytes)}
        asking = [x for x in (self.epochs, self.index) if x is not None]
        out["throttled_total"] = float(sum(getattr(x, "throttled", 0) for x in asking))
        out["control_failures_total"] = float(sum(getattr(x, "failures", 0) for x in asking))
        for transport in self.transports.values():
            for key, value in transport.stats().items():
                if key.startswith("staging"):
                    out[key] = value
                else:
                    out[key] = min(out.get(key, 1.0), value) if key == "container_ok" else out.get(key, 0.0) + value
        return out

    def close(self, drain_s: float) -> bool:
        """Within `drain_s` seconds (transfers: 1) whatever the store does; True when no transfer is left.

        What still waits for an answer then (the index's last append, say) is on daemon threads, which no exit waits for.
        """
        end = time.monotonic() + drain_s
        if self._closed:  # an engine that ends may ask twice
            return all([t.close(0.0) for t in self.transports.values()])
        self._closed = True
        if self.note is not None:
            self.note.close()
        drained = all([t.close(min(1.0, max(0.0, end - time.monotonic()))) for t in self.transports.values()])
        closing = threading.Thread(target=self._finish, args=(drained,), name="kv-close", daemon=True)
        closing.start()
        closing.join(max(0.0, end - time.monotonic()))
        return drained

    def _finish(self, drained: bool) -> None:
        if self.follower is not None:
            self.follower.close()
        if self.fence is not None:
            self.fence.close(drained)
        for close in self.closers:
            close()


def staging_pool(config: KvTiersConfig, row_bytes: int) -> StagingPool:
    """Raises KV-STAGING when the budget is too small for chunks of this size."""
    slot = HEADER_BYTES + row_bytes
    slots = config.staging_bytes // slot
    if slots < MIN_SLOTS:
        raise DynamoBlobError(
            "KV-STAGING", f"staging memory holds {slots} chunks, at least {MIN_SLOTS} are needed", where="kv.staging_bytes",
            why=f"a chunk takes {slot} bytes, staging_bytes is {config.staging_bytes}",
            do=f"set staging_bytes to at least {MIN_SLOTS * slot}, or blocks_per_chunk lower",
        )  # fmt: skip
    return StagingPool(min(slots, 4 * config.threads), slot)


def open_tier(
    config: KvTiersConfig, store: str, row_bytes: int, namespaces: list[Namespace], worker: str = ""
) -> Opened:
    """Open the "blob" or "posix" store of a worker. An outage is a miss, not a failed start: the store has a few seconds."""
    pool = staging_pool(config, row_bytes)
    key = mac_key(config.mac_key_file)
    if store == "posix":
        transport = posix_transport(config.nvme_dir, pool, config)
        notes: Notes = DirectoryNotes(Path(config.nvme_dir))
        watched = Watched(config.tenants_file, config.container)
        opened = Opened(pool, {"dir": transport}, watched.classes, directory=True, mac_key=key)
        if config.tenants_file:
            opened.follower = Follower(watched, lambda new: setattr(opened, "classes", new), config.epochs_refresh_s)
        opened.note = Others(notes, namespaces)
        control = _follow_purges(opened, config) if config.account is not None else None
        opened.index = index = DirectoryIndex()
        opened.upkeep = Upkeep(
            Path(config.nvme_dir), lambda: opened.classes, Owners(config.tenants_file), index, epochs=opened.epochs,
            control=control, look_s=config.epochs_refresh_s,
        ).start()  # fmt: skip
        opened.closers.insert(0, opened.upkeep.close)
    else:
        opened = _open_blob(config, pool, namespaces, worker or f"worker-{os.getpid()}")
        opened.mac_key = key
    for transport in opened.transports.values():
        leave_at_exit(transport)
    return opened


def _follow_purges(opened: Opened, config: KvTiersConfig) -> KvStore:
    """The tenants' purge generations rule a directory beside a Blob tier too."""
    assert config.account is not None
    account = Account(config.account)
    control = KvStore(account, home_of(config), threads=1)
    opened.epochs = Epochs(
        control.read_epochs, refresh_s=config.epochs_refresh_s, stale_s=config.epochs_stale_s
    ).start()  # fmt: skip
    opened.epochs.wait_first(FIRST_READ_S)
    opened.closers = [opened.epochs.close, control.close, account.close]
    return control


FIRST_READ_S = 3.0
"""Seconds a start waits for the purge generations."""


def _open_blob(config: KvTiersConfig, pool: StagingPool, namespaces: list[Namespace], worker: str) -> Opened:
    assert config.account is not None
    account, watched = Account(config.account), Watched(config.tenants_file, config.container)
    classes = watched.classes
    transports = {c: blob_transport(account, c, pool, config) for c in sorted(set(classes.containers().values()))}
    home = home_of(config)
    control = KvStore(account, home, threads=1)
    index = SharedIndex(control, worker, capacity=_CATALOGUE).start()
    fence = Fence(control, worker)

    def generations() -> dict[str, int]:
        """Until this worker and its containers are known to those who purge it knows no generation, and puts nothing."""
        if not fence.registered:
            remember(control, classes.containers().values())
            fence.register()
        return control.read_epochs()

    def raised(tenant: str, generation: int) -> None:
        fence.raised(tenant, generation)  # first: a purge waits for it
        purged(index, tenant, generation)

    epochs = Epochs(
        generations, refresh_s=config.epochs_refresh_s, stale_s=config.epochs_stale_s, on_raise=raised
    ).start()  # fmt: skip
    fence.start(epochs.generation)
    epochs.wait_first(FIRST_READ_S)
    opened = Opened(pool, transports, classes, epochs=epochs, fence=fence)

    def enter(new: Classes) -> None:
        """Classes of a changed file. A container that was dropped keeps its transport: requests under way use it."""
        fresh = sorted(set(new.containers().values()) - opened.transports.keys())
        for container in fresh:
            account.probe(container)
        remember(control, fresh)
        more = {c: blob_transport(account, c, pool, config) for c in fresh}
        for transport in more.values():
            leave_at_exit(transport)
        opened.transports = {**opened.transports, **more}
        opened.classes = new

    if config.tenants_file:
        opened.follower = Follower(watched, enter, config.epochs_refresh_s)
    opened.note = Others(BlobNotes(account, home), namespaces)
    opened.closers = [epochs.close, index.close, control.close, account.close]
    if config.announce:
        opened.listener = Listener(config.announce, "purged", lambda _: epochs.look_now(), f"{worker} tiers").start()
        opened.closers.insert(0, opened.listener.close)
    opened.index = index
    return opened


def purged(index: SharedIndex, tenant: str, generation: int) -> None:
    """A tenant's generation rose: nobody asks for its older objects again, so the index need not hold them."""
    dropped = index.catalogue.drop_before(tenant, generation)
    if dropped:
        log.info(
            "purge of tenant %s: generation %d, %d objects dropped from the index", tenant[:8], generation, dropped
        )
