"""The sweeper's snapshot, written by the one that holds the lease and by nobody after it.

A large snapshot takes longer than a lease may last, so each write names the snapshot it replaces (ETag): a sweeper whose
lease went to another while it wrote is refused by the store. Anything else in the way (a conflict, a blob of another
kind under the name) is tried again a few times and then told: a sweep is not undone by its notes.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from azure.core import MatchConditions

from components.common.kv.store import SNAPSHOT_OBJECT, KvStore, Lease
from components.common.storage.errors import StorageError

log = logging.getLogger(__name__)

_TRIES = 4
_WAIT_S = 0.1


class Publisher:
    """Writes the snapshot; `etag` is the one it last read or wrote ("" = there is none)."""

    def __init__(self, store: KvStore, lease: Lease) -> None:
        self._store, self._lease = store, lease
        self.etag = ""
        self.problem = ""
        """Why the last snapshot was not written; empty = it was."""

    def base(self) -> bytes | None:
        """The snapshot there is."""
        raw, self.etag = self._store.read(SNAPSHOT_OBJECT)
        return raw

    def write(self, body: bytes) -> bool:
        """False when the lease is lost: nothing more may be written. `problem` says whether the snapshot is there.

        Raises StorageError when the store does not answer."""
        for attempt in range(_TRIES):
            if not self._lease.keep():
                return False
            try:
                self.etag, self.problem = self._put(body), ""
                return True
            except StorageError as e:
                if e.code not in ("STORAGE-CONFLICT", "STORAGE-PRECONDITION"):
                    raise
                self.problem = f"{e.code}: {e.why}"
            time.sleep(_WAIT_S * 2**attempt)
            if not self._lease.acquire():  # asked of the store: was it another sweeper that wrote?
                return False
            self._clear("InvalidBlobType" in self.problem)
        log.warning("KV-SWEEP-SNAPSHOT: the snapshot is not written; workers start from an older one: %s", self.problem)
        return True

    def _put(self, body: bytes) -> str:
        condition: dict[str, Any] = (
            {"overwrite": True, "etag": self.etag, "match_condition": MatchConditions.IfNotModified}
            if self.etag
            else {"overwrite": False}
        )
        store = self._store
        store.requests["write"] += 1
        with store.account.errors(store.control, SNAPSHOT_OBJECT):
            answer = store.account.blob(store.control, SNAPSHOT_OBJECT).upload_blob(body, length=len(body), **condition)
        return str(answer["etag"])

    def _clear(self, wrong_kind: bool) -> None:
        """The lease is ours: whatever lies there is to be replaced."""
        store = self._store
        found = store.account.find(store.control, SNAPSHOT_OBJECT)
        if found is not None and wrong_kind:
            store.delete(store.control, [SNAPSHOT_OBJECT])
            found = None
        self.etag = found.etag if found else ""
