"""Sealed files for workers of this node: descriptors over a Unix socket (SCM_RIGHTS), beside the HTTP socket.

A worker connects, sends the file's blake3 in hex and a newline, and gets one line of JSON: {"sealed": true, "size": n}
with the descriptor, or {"sealed": false} and the end. While the connection stays open the file is leased.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from pathlib import Path

from components.common.messages.weights import HANDOVER_SUFFIX
from components.weights.service import WeightService

log = logging.getLogger("dynamo_blob.weights")

_ASK_S = 5.0
_MOST = 1024  # leases at a time; beyond it workers use the files on tmpfs
_LINE = 65  # 64 hex digits and the newline


class Handover:
    """Listens from `start` to `close`, on the service's event loop."""

    def __init__(self, service: WeightService) -> None:
        self.service = service
        self._path = Path(service.config.listen.removeprefix("unix:") + HANDOVER_SUFFIX)
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """The HTTP socket is ours already, so what lies at our path is a dead service's. Nothing to do over TCP."""
        if not self.service.config.listen.startswith("unix:"):
            return
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self._path))
        os.chmod(self._path, 0o660)
        self._listener.listen(64)
        self._keep(self._accept(self._listener))

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    def _keep(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            if len(self._tasks) > _MOST:
                connection.close()
            else:
                self._keep(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        loop, cache = asyncio.get_running_loop(), self.service.cache
        sealed = None
        try:
            async with asyncio.timeout(_ASK_S):
                digest = await _line(connection)
            sealed = cache.lease_sealed(digest) if cache is not None else None
            if sealed is None:
                await loop.sock_sendall(connection, b'{"sealed": false}\n')
                return
            self.service.count("sealed_leases")
            answer = json.dumps({"sealed": True, "size": sealed.file.size}).encode() + b"\n"
            socket.send_fds(connection, [answer], [sealed.fd])
            while await loop.sock_recv(connection, 64):
                pass
        except (OSError, TimeoutError, ValueError):
            pass  # the worker is gone, or none of ours
        finally:
            if sealed is not None and cache is not None:
                cache.release(sealed)
            with contextlib.suppress(OSError):
                connection.close()


async def _line(connection: socket.socket) -> str:
    data = b""
    while len(data) < _LINE:
        got = await asyncio.get_running_loop().sock_recv(connection, _LINE - len(data))
        if not got:
            raise ValueError("the request ends early")
        data += got
    return data.rstrip(b"\n").decode("ascii")
