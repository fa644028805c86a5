"""Files of the node cache, mapped by a loader.

The mapping is private and writable: pages are shared with every other worker until the loader itself
writes one, which it does only to put right a range that turned out wrong or will not come any more.
A lease is an open connection to the weight service; it pins the file there and ends by itself when
the last tensor of the mapping is gone, or the process is.

A sealed file (`sealed`) is one that the weight service verified and the kernel keeps from changing. It is not hashed
again but for one range, drawn by lot: a service that hands over something else is found out.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import random
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from components.common.errors import DynamoBlobError
from components.common.loading.client import ServiceClient, ServiceGone, connect, service_error
from components.common.loading.pages import map_file
from components.common.messages.weights import HANDOVER_SUFFIX
from components.common.registry.manifest import FileEntry

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
SILENCE_S = 5.0  # the service sends something at least every second; after this it counts as lost


class MappedFile:
    """`array`: the file's bytes. `wait(i)`: whether range i may be read there (it must still be verified).

    `lot`: None, or the one range of a sealed file that is hashed here.
    """

    def __init__(
        self, file: FileEntry, array: np.ndarray[Any, Any], close: Callable[[], None] | None = None, *, sealed: bool = False
    ) -> None:  # fmt: skip
        self.file, self.array = file, array
        self._changed = threading.Condition()
        self._ready = bytearray(len(file.ranges))
        self._lost = ""
        self.lot = random.SystemRandom().randrange(len(file.ranges)) if sealed and file.ranges else None
        if close is not None:
            weakref.finalize(array, close).atexit = False

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


def map_private(path: str, file: FileEntry) -> np.ndarray[Any, Any]:
    """Raises WEIGHTS-CACHE-ENTRY if the file is not there or has another size (a truncated map would kill the process)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise _unusable(path, str(e.strerror)) from None
    try:
        return _map_private(fd, path, file)
    finally:
        os.close(fd)


def _map_private(fd: int, path: str, file: FileEntry) -> np.ndarray[Any, Any]:
    size = os.fstat(fd).st_size
    if size != file.size:
        raise _unusable(path, f"{size} bytes, expected {file.size}")
    return map_file(fd, size, private=True)


def _unusable(path: str, why: str) -> DynamoBlobError:
    return DynamoBlobError("WEIGHTS-CACHE-ENTRY", "a file of the node cache cannot be used", where=path, why=why)


def take_sealed(service: ServiceClient, file: FileEntry, uid: int) -> MappedFile | None:
    """The service's sealed copy of `file`, leased and mapped; None if it has none (now), or nobody listens.

    `uid`: whom the kernel must name as the listener, see WeightsConfig.sealed_uid. Raises WEIGHTS-SEALED-REFUSED
    when somebody else listens or what came is not sealed, WEIGHTS-CACHE-ENTRY when it has another size: then hash what
    is on tmpfs.
    """
    if not service.address.startswith("unix:") or uid < -1 or not file.size:
        return None
    where = service.address + HANDOVER_SUFFIX
    connection, fds = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), list[int]()
    try:
        connection.settimeout(SILENCE_S)
        connection.connect(where.removeprefix("unix:"))
        listener = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if listener != (os.geteuid() if uid == -1 else uid):
            raise _refused(where, f"uid {listener} listens there, expected {os.geteuid() if uid == -1 else uid}")
        connection.sendall(file.blake3.encode() + b"\n")
        _, fds, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        if not fds:
            connection.close()
            return None
        check_sealed(fds[0], where)
        mapped = MappedFile(file, _map_private(fds[0], where, file), connection.close, sealed=True)
        mapped.announce("all")
        return mapped
    except DynamoBlobError:
        connection.close()
        raise
    except OSError:
        connection.close()
        return None
    finally:
        for fd in fds:
            os.close(fd)


def check_sealed(fd: int, where: str) -> None:
    """Raises WEIGHTS-SEALED-REFUSED unless the kernel keeps `fd` from every change of content or size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as e:
        raise _refused(where, f"the descriptor takes no seals: {e.strerror}") from None
    if seals & SEALS != SEALS:
        raise _refused(where, f"seals {seals:#x}, expected {SEALS:#x}")


def _refused(where: str, why: str) -> DynamoBlobError:
    return DynamoBlobError(
        "WEIGHTS-SEALED-REFUSED", "a sealed file is not taken from the weight service", where=where, why=why,
        do="every byte is hashed here instead; give weights.sealed_uid the uid that the weight service runs as",
    )  # fmt: skip


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
            mapped = MappedFile(file, map_private(str(first["path"]), file), connection.close)
        except DynamoBlobError:  # it was completed, and so renamed, between the answer and our open
            mapped = MappedFile(file, map_private(str(first["then"]), file), connection.close)
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
    mapped = MappedFile(file, map_private(str(Path(cache_dir) / "objects" / file.blake3), file))
    mapped.announce("all")
    return mapped
