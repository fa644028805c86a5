"""The KV containers as the control plane sees them: listings, deletions, epochs, lease, snapshot.

Everything of ours besides objects lies under ``_control/`` in the graph's KV container:

    _control/epochs.json             {tenant: generation}, ETag compare-and-swap (see epochs.py, generations.py)
    _control/epochs.copy.json        the same, written first
    _control/quarantine.json         marks of KV found wrong, ETag compare-and-swap (see quarantine.py)
    _control/sweeper.lock            the blob whose lease makes one sweeper the one that works
    _control/catalogue.snapshot      the catalogue, written by the sweeper
    _control/journal/<worker>.log    append blobs: puts, hits and losses of each worker
    _control/purges/<id>.json        state of a purge: resumable
    _control/containers.json         every container ever used, ETag compare-and-swap (see containers.py)
    _control/containers.copy.json    the same, written first
    _control/workers/<worker>.json   what each worker says of its puts when a generation rose (see fence.py)

Never on the request path.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from azure.storage.blob import BlobLeaseClient

from components.common.kv import generations
from components.common.storage.account import Account, BlobInfo
from components.common.storage.errors import StorageError

CONTROL = "_control/"
LOCK_OBJECT = "_control/sweeper.lock"
SNAPSHOT_OBJECT = "_control/catalogue.snapshot"
JOURNAL_PREFIX = "_control/journal/"
NAMESPACES = "_control/namespaces/"
"""One small JSON per namespace ever used in the container: why two workers do not share."""
PURGE_PREFIX = generations.PURGES
WORKERS_PREFIX = "_control/workers/"
CONTAINERS_OBJECT = "_control/containers.json"
KEEP_EVERY = 1024
"""Names of a listing between two looks at the lease."""


class Deleted(NamedTuple):
    """Outcome of a bulk deletion: names by what happened to them."""

    deleted: list[str]
    missing: list[str]
    failed: dict[str, str]


class KvStore:
    """One KV account. `control`: the container that holds ``_control/``. `threads`: deletions in flight."""

    def __init__(self, account: Account, control: str, *, threads: int = 8) -> None:
        self.account, self.control = account, control
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kv-delete")
        self.requests = {"list": 0, "delete": 0, "read": 0, "write": 0}

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    # --- objects

    def list(self, container: str, prefix: str = "") -> Iterator[BlobInfo]:
        """Blobs under `prefix`, 5000 a request. A missing container is an empty one."""
        pages = self.account.container(container).list_blobs(name_starts_with=prefix or None, results_per_page=5000)
        with self.account.errors(container, prefix):
            try:
                for page in pages.by_page():
                    self.requests["list"] += 1
                    for p in page:
                        yield BlobInfo(
                            p.name, int(p.size or 0), str(p.etag), p.last_modified.timestamp(),
                            created=p.creation_time.timestamp() if p.creation_time else 0.0,
                        )  # fmt: skip
            except Exception as e:
                if getattr(e, "error_code", "") == "ContainerNotFound":
                    return
                raise

    def each(self, container: str, keep: Callable[[], object]) -> Iterator[BlobInfo]:
        """`list` of a whole container; `keep` is called every KEEP_EVERY names: a listing may outlast a lease."""
        for number, info in enumerate(self.list(container)):
            if number % KEEP_EVERY == 0:
                keep()
            yield info

    def delete(self, container: str, names: Iterable[str], go: Callable[[], bool] = lambda: True) -> Deleted:
        """Delete each name, `threads` at a time. One that is missing is done; failures are returned, not raised.

        go   asked before each request; False = none is sent any more (``STOPPED``): a lease was lost
        """
        out = Deleted([], [], {})
        for name, why in self._pool.map(lambda n: self._delete_one(container, n, go), names):
            if why is None:
                out.deleted.append(name)
            elif why == "":
                out.missing.append(name)
            else:
                out.failed[name] = why
        return out

    def _delete_one(self, container: str, name: str, go: Callable[[], bool]) -> tuple[str, str | None]:
        if not go():
            return name, "STOPPED"
        try:
            self.requests["delete"] += 1
            with self.account.errors(container, name):  # a blob that has snapshots cannot be deleted without them
                self.account.blob(container, name).delete_blob(delete_snapshots="include")
            return name, None
        except StorageError as e:
            return name, "" if e.code in ("STORAGE-NOT-FOUND", "STORAGE-NO-CONTAINER") else e.code

    # --- epochs

    def read_epochs(self) -> dict[str, int]:
        """{tenant: generation}, restored if they were lost. Raises StorageError, or KV-EPOCHS-INVALID (never read as empty)."""
        return generations.read(self)[0]

    def raise_epoch(self, tenant: str, at_least: int = 0) -> int:
        """Raise a tenant's generation by one, and to `at_least`; the new one. Raises as `generations.raise_` does."""
        return generations.raise_(self, tenant, at_least)

    # --- small objects under _control/

    def swap(self, name: str, body: bytes, etag: str) -> bool:
        """Write a control object if it is still what `etag` says ("" = it is not there); False when others were faster."""
        try:
            if etag:
                self.account.replace(self.control, name, body, etag=etag)
            else:
                self.account.create(self.control, name, body)
        except StorageError as e:
            if e.code in ("STORAGE-CONFLICT", "STORAGE-PRECONDITION"):
                return False
            raise
        self.requests["write"] += 1
        return True

    def read(self, name: str, offset: int = 0, length: int | None = None) -> tuple[bytes | None, str]:
        """(bytes, ETag) of a control object or a range of it, (None, "") when there is none."""
        try:
            self.requests["read"] += 1
            return self.account.get_with_etag(self.control, name, offset, length)
        except StorageError as e:
            if e.code in ("STORAGE-NOT-FOUND", "STORAGE-RANGE"):
                return None, ""
            raise

    def write(self, name: str, data: bytes) -> None:
        """Write or overwrite a control object of any size."""
        self.requests["write"] += 1
        with self.account.errors(self.control, name):
            self.account.blob(self.control, name).upload_blob(data, length=len(data), overwrite=True)

    def protection(self) -> dict[str, Any]:
        """What keeps deleted data alive: {soft_delete_days, versioning, known}. `known` False: `why` says what is not.

        The data plane has no property for versioning: a write is answered with a version, or it is not.
        """
        out: dict[str, Any] = {"soft_delete_days": 0, "versioning": False, "known": True}
        try:
            with self.account.errors(""):
                policy = self.account.service.get_service_properties().get("delete_retention_policy")
            out["soft_delete_days"] = int(policy.days or 0) if policy is not None and policy.enabled else 0
        except StorageError as e:
            out |= {"known": False, "why": f"soft delete: {e.code}"}
        name = f"{PURGE_PREFIX}{uuid.uuid4().hex}.probe"
        try:
            with self.account.errors(self.control, name):
                answer = self.account.blob(self.control, name).upload_blob(b"", length=0)
            out["versioning"] = bool(answer.get("version_id"))
            self.delete(self.control, [name])
        except StorageError as e:
            out |= {"known": False, "why": "; ".join(filter(None, (out.get("why"), f"versioning: {e.code}")))}
        return out

    def _uri(self, name: str) -> str:
        return self.account.uri(self.control, name)


class Lease:
    """A lease on ``_control/sweeper.lock``: at most one holder; it runs out by itself when the holder dies.

    `held` is judged by our own clock with a margin of a fifth, so a holder stops before another can begin.
    """

    def __init__(self, store: KvStore, seconds: int = 30) -> None:
        if not 15 <= seconds <= 60:
            raise ValueError("Azure leases last 15 to 60 seconds")
        self._store, self._seconds = store, seconds
        self._lease: BlobLeaseClient | None = None
        self._until = 0.0

    def acquire(self) -> bool:
        """Take or renew the lease; False when somebody else has it. Raises StorageError when the store cannot be asked."""
        account, control = self._store.account, self._store.control
        asked = time.monotonic()
        try:
            with account.errors(control, LOCK_OBJECT):
                if self._lease is not None:
                    self._lease.renew()
                else:
                    if account.find(control, LOCK_OBJECT) is None:
                        try:
                            account.create(control, LOCK_OBJECT, b"{}")
                        except StorageError as e:
                            if e.code != "STORAGE-CONFLICT":
                                raise
                    self._lease = account.blob(control, LOCK_OBJECT).acquire_lease(lease_duration=self._seconds)
        except StorageError as e:
            self._lease, self._until = None, 0.0
            if e.code in ("STORAGE-CONFLICT", "STORAGE-PRECONDITION", "STORAGE-NOT-FOUND"):
                return False
            raise
        self._until = asked + self._seconds * 0.8
        return True

    @property
    def held(self) -> bool:
        return self._lease is not None and time.monotonic() < self._until

    def keep(self) -> bool:
        """Renew when half of the time is gone; True while held."""
        if self._lease is None:
            return False
        if time.monotonic() > self._until - self._seconds * 0.4:
            return self.acquire()
        return self.held

    def release(self) -> None:
        if self._lease is not None:
            try:
                with self._store.account.errors(self._store.control, LOCK_OBJECT):
                    self._lease.release()
            except StorageError:
                pass  # it runs out by itself
        self._lease, self._until = None, 0.0
