"""An account in memory with the semantics of `Account`, for exploring thousands of interleavings.

`tests/unit/registry/test_memory_account.py` holds it against Azurite, call by call. Every call, reads
included, goes through `hook` first: that is where a scheduler stops, orders and kills operations.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from components.common.storage.account import BlobInfo
from components.common.storage.errors import StorageError, from_http


@dataclass
class Blob:
    data: bytes = b""
    etag: str = ""
    modified: float = 0.0
    committed: bool = False
    staged: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Blobs:
    """What lies in the account; shared by every client of it. `clock` is unix seconds."""

    containers: dict[str, dict[str, Blob]] = field(default_factory=dict)
    clock: float = 1_000_000.0
    _etags: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.RLock = field(default_factory=threading.RLock)

    def copy(self) -> Blobs:
        """The same content, independent from now on (nobody may be writing)."""
        boxes = {
            c: {n: replace(b, staged=dict(b.staged)) for n, b in box.items()} for c, box in self.containers.items()
        }
        start = int(next(self._etags))
        return Blobs(boxes, self.clock, itertools.count(start))

    def changed(self, blob: Blob) -> str:
        blob.etag, blob.modified = f'"0x{next(self._etags):X}"', self.clock
        return blob.etag


class MemoryAccount:
    """One client of `blobs`, as `identity`. Same names, results and errors as Account."""

    def __init__(self, blobs: Blobs, identity: str = "memory", hook: Callable[[str], None] | None = None) -> None:
        self.blobs, self.identity, self.url = blobs, identity, "http://memory/acct"
        self._hook = hook
        self.hook = None

    def uri(self, container: str, blob: str = "") -> str:
        return f"{self.url}/{container}" + (f"/{blob}" if blob else "")

    def _call(self, what: str, container: str, name: str) -> dict[str, Blob]:
        if self._hook:
            self._hook(f"{what} {container}/{name}")
        if container not in self.blobs.containers:
            raise self._error(404, "ContainerNotFound", container, name)
        return self.blobs.containers[container]

    def _error(self, status: int, code: str, container: str, name: str) -> StorageError:
        return from_http(status, code, self.uri(container, name), self.identity)

    def _existing(self, box: dict[str, Blob], container: str, name: str) -> Blob:
        blob = box.get(name)
        if blob is None or not blob.committed:
            raise self._error(404, "BlobNotFound", container, name)
        return blob

    def _matching(self, box: dict[str, Blob], container: str, name: str, etag: str) -> Blob:
        blob = box.get(name)
        if blob is None or not blob.committed or blob.etag != etag:
            missing = blob is None or not blob.committed
            raise self._error(
                404 if missing else 412, "BlobNotFound" if missing else "ConditionNotMet", container, name
            )
        return blob

    def ensure_container(self, name: str) -> bool:
        with self.blobs.lock:
            return self.blobs.containers.setdefault(name, {}) == {}

    def get(self, container: str, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.get_with_etag(container, name, offset, length)[0]

    def get_with_etag(self, container: str, name: str, offset: int = 0, length: int | None = None) -> tuple[bytes, str]:
        box = self._call("get", container, name)
        with self.blobs.lock:
            blob = self._existing(box, container, name)
            if offset and offset >= len(blob.data):
                raise self._error(416, "InvalidRange", container, name)
            return blob.data[offset : None if length is None else offset + length], blob.etag

    def head(self, container: str, name: str) -> BlobInfo:
        box = self._call("head", container, name)
        with self.blobs.lock:
            blob = self._existing(box, container, name)
            return BlobInfo(name, len(blob.data), blob.etag, blob.modified)

    def find(self, container: str, name: str) -> BlobInfo | None:
        try:
            return self.head(container, name)
        except StorageError as e:
            if e.code == "STORAGE-NOT-FOUND":
                return None
            raise

    def create(self, container: str, name: str, data: bytes, *, metadata: dict[str, str] | None = None) -> str:
        box = self._call("put", container, name)
        with self.blobs.lock:
            if name in box and box[name].committed:
                raise self._error(409, "BlobAlreadyExists", container, name)
            box[name] = blob = Blob(data, committed=True)
            return self.blobs.changed(blob)

    def replace(self, container: str, name: str, data: bytes, *, etag: str) -> str:
        box = self._call("put", container, name)
        with self.blobs.lock:
            if name not in box or not box[name].committed or box[name].etag != etag:
                raise self._error(412, "ConditionNotMet", container, name)
            box[name] = blob = Blob(data, committed=True)
            return self.blobs.changed(blob)

    def stage(self, container: str, name: str, block: str, data: bytes) -> None:
        box = self._call("stage", container, name)
        with self.blobs.lock:
            box.setdefault(name, Blob()).staged[block] = data

    def staged(self, container: str, name: str) -> set[str]:
        box = self._call("staged", container, name)
        with self.blobs.lock:
            return set(box[name].staged) if name in box else set()

    def commit(self, container: str, name: str, blocks: list[str], *, tier: str = "") -> None:
        box = self._call("commit", container, name)
        with self.blobs.lock:
            blob = box.get(name) or Blob()
            if blob.committed:
                raise self._error(409, "BlobAlreadyExists", container, name)
            if any(b not in blob.staged for b in blocks):
                raise self._error(400, "InvalidBlockList", container, name)
            blob.data, blob.committed, blob.staged = b"".join(blob.staged[b] for b in blocks), True, {}
            self.blobs.changed(blob)

    def touch(self, container: str, name: str, etag: str, mark: str) -> str:
        box = self._call("touch", container, name)
        with self.blobs.lock:
            return self.blobs.changed(self._matching(box, container, name, etag))

    def delete(self, container: str, name: str, *, etag: str = "") -> None:
        box = self._call("delete", container, name)
        with self.blobs.lock:
            self._matching(box, container, name, etag) if etag else self._existing(box, container, name)
            del box[name]

    def list(self, container: str, prefix: str = "", *, metadata: bool = False) -> Iterator[BlobInfo]:
        box = self._call("list", container, prefix)
        with self.blobs.lock:
            found = [
                BlobInfo(n, len(b.data), b.etag, b.modified)
                for n, b in sorted(box.items())
                if n.startswith(prefix) and b.committed
            ]
        yield from found

    def append_open(self, container: str, name: str) -> None:
        box = self._call("append-open", container, name)
        with self.blobs.lock:
            if name not in box:
                box[name] = blob = Blob(committed=True)
                self.blobs.changed(blob)

    def append(self, container: str, name: str, data: bytes, *, at: int) -> None:
        box = self._call("append", container, name)
        with self.blobs.lock:
            blob = self._existing(box, container, name)
            if len(blob.data) != at:
                raise self._error(412, "AppendPositionConditionNotMet", container, name)
            blob.data += data
            self.blobs.changed(blob)
