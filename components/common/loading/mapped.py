"""Files of the node cache, mapped by a loader.

The mapping is private and writable: pages are shared with every other worker until the loader itself
writes one, which it does only to put right a range that turned out wrong or will not come any more.
A lease is an open connection to the weight service; it pins the file there and ends by itself when
the last tensor of the mapping is gone, or the process is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from components.common.errors import DynamoBlobError
from components.common.loading.client import ServiceClient, ServiceGone, connect, service_error
from components.common.registry.manifest import FileEntry

SILENCE_S = 5.0  # the service sends something at least every second; after this it counts as lost


class MappedFile:
    """`array`: the file's bytes. `wait(i)`: whether range i may be read there (it must still be verified)."""

    def __init__(self, file: FileEntry, path: str, lease: http.client.HTTPConnection | None = None) -> None:
        self.file = file
        self._lease = lease
        self._changed = threading.Condition()
        self._ready = bytearray(len(file.ranges))
        self._lost = ""
        region = map_private(path, file)
        self.array: np.ndarray[Any, Any] = np.frombuffer(region, dtype=np.uint8)
        if lease is not None:
            weakref.finalize(self.array, lease.close).atexit = False

    def announce(self, indices: Any) -> None:
        with self._changed:
            if indices == "all":
                self._ready = bytearray(b"\1" * len(self._ready))
            else:
                for i in indices:
                    self._ready[i] = 1
            self._changed.notify_all()

    def lose(self, why: str) -> None:
        """No more ranges will be announced."""
        with self._changed:
            self._lost = self._lost or why
            self._changed.notify_all()

    @property
    def lost(self) -> str:
        return self._lost

    def wait(self, index: int, deadline: float, stopped: Callable[[], bool]) -> bool:
        """True once range `index` is there; False if it will not come by `deadline`."""
        with self._changed:
            while not self._ready[index]:
                if self._lost or stopped() or time.monotonic() >= deadline:
                    return False
                self._changed.wait(0.1)
            return True


def map_private(path: str, file: FileEntry) -> mmap.mmap:
    """Raises WEIGHTS-CACHE-ENTRY if the file is not there or has another size (a truncated map would kill the process)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise DynamoBlobError(
            "WEIGHTS-CACHE-ENTRY", "a file of the node cache cannot be opened", where=path, why=str(e.strerror)
        ) from None
    try:
        size = os.fstat(fd).st_size
        if size != file.size:
            raise DynamoBlobError(
                "WEIGHTS-CACHE-ENTRY",
                "a file of the node cache has the wrong size",
                where=path,
                why=f"{size} bytes, expected {file.size}",
            )
        return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def lease(service: ServiceClient, file: FileEntry) -> MappedFile:
    """Lease `file` from the service and map it; ranges are announced as they become ready.

    Raises ServiceGone, or the service's error (WEIGHTS-NO-CACHE, WEIGHTS-CACHE-FULL: read Blob instead).
    """
    connection = connect(service.address, SILENCE_S)
    try:
        connection.request("GET", f"/v1/lease?object={file.blake3}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise service_error(answer.status, answer.read(), service.address)
        while not (first := json.loads(answer.readline())):
            pass  # it makes room for the file, and says every second that it lives
        if first.get("error"):
            raise service_error(503, json.dumps(first["error"]).encode(), service.address)
        try:
            mapped = MappedFile(file, str(first["path"]), connection)
        except DynamoBlobError:  # it was completed, and so renamed, between the answer and our open
            mapped = MappedFile(file, str(first["then"]), connection)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as e:
        connection.close()
        raise ServiceGone(f"{service.address}: {type(e).__name__}: {e}") from None
    except DynamoBlobError:
        connection.close()
        raise
    mapped.announce(first.get("ready", []))
    threading.Thread(target=_follow, args=(weakref.ref(mapped), answer), name="weights-lease", daemon=True).start()
    return mapped


def _follow(target: weakref.ref[MappedFile], answer: http.client.HTTPResponse) -> None:
    """Read announcements until the file is complete, lost, or nobody wants it any more."""
    why = "the weight service closed the lease"
    try:
        while line := answer.readline():
            message, mapped = json.loads(line), target()
            if mapped is None:
                return
            if message.get("error"):
                mapped.lose(str(message["error"].get("code")))
                return
            if "ready" in message:
                mapped.announce(message["ready"])
            if message.get("done"):
                return
            del mapped
    except (OSError, http.client.HTTPException, ValueError, AttributeError) as e:
        why = f"the weight service is lost: {type(e).__name__}"
    with contextlib.suppress(AttributeError):
        target().lose(why)  # type: ignore[union-attr]


def local(cache_dir: str, file: FileEntry) -> MappedFile:
    """A complete file of the node cache without its service (on_outage: use_cache)."""
    mapped = MappedFile(file, str(Path(cache_dir) / "objects" / file.blake3))
    mapped.announce("all")
    return mapped
