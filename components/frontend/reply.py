"""An answer to a client, written to its socket by hand.

aiohttp reads the request and owns the connection; for the answer its writer would cost a coroutine, a header dict and
a system call for the head alone. Here the head goes out with the first bytes, and every packet of the frontend becomes
one chunk. The end is said once, so that a connection is reused only after a whole answer.
"""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate

from aiohttp import HttpVersion11, web


class ClientStalled(ConnectionError):
    """The client reads no more."""


class Reply(web.StreamResponse):
    """`whole` or else `begin`, `write`..., `end`. To aiohttp it is a response that was sent."""

    def __init__(self, request: web.Request, status: int, content_type: str, request_id: str) -> None:
        super().__init__(status=status)
        self._client = request
        self._frames = request.version >= HttpVersion11
        self._content_type_line, self._request_id = content_type, request_id
        self.begun = False

    @property
    def prepared(self) -> bool:
        return self.begun

    def whole(self, body: bytes) -> None:
        self._keep_alive = self._client.keep_alive
        self._send(self._head(f"content-length: {len(body)}\r\n") + body)
        self._eof_sent = True

    def begin(self, chunk: bytes) -> None:
        self._keep_alive = self._client.keep_alive and self._frames
        more = "cache-control: no-cache\r\nx-accel-buffering: no\r\n" + "transfer-encoding: chunked\r\n" * self._frames
        self._send(self._head(more) + self._frame(chunk))

    def write(self, chunk: bytes) -> bool:  # type: ignore[override]
        """False when the client is behind or gone: `caught_up` before the next."""
        self._send(self._frame(chunk))
        return not (self._client.protocol.writing_paused or self._gone())

    def end(self, chunk: bytes = b"") -> None:
        """The last chunk and the end."""
        last = (self._frame(chunk) if chunk else b"") + (b"0\r\n\r\n" if self._frames else b"")
        if last:
            self._send(last)
        self._eof_sent = True

    async def caught_up(self, deadline_s: float) -> None:
        """Until the client has read on. Raises ClientStalled, ConnectionError."""
        if self._gone():
            raise ConnectionResetError("the client left")
        protocol = self._client.protocol
        if not protocol.writing_paused:
            return
        try:
            async with asyncio.timeout(deadline_s):
                await protocol._drain_helper()
        except TimeoutError:
            if self._client.transport is not None:
                self._client.transport.abort()
            raise ClientStalled from None

    def _gone(self) -> bool:
        transport = self._client.transport
        return transport is None or transport.is_closing()

    def _send(self, data: bytes) -> None:
        self.begun = True
        transport = self._client.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def _frame(self, chunk: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._frames else chunk

    def _head(self, more: str) -> bytes:
        minor, keep = (1, self._keep_alive) if self._frames else (0, self._keep_alive)
        connection = "" if keep and minor else f"connection: {'keep-alive' if keep else 'close'}\r\n"
        return (
            f"HTTP/1.{minor} {self.status} {self.reason}\r\ncontent-type: {self._content_type_line}\r\n"
            f"x-request-id: {self._request_id}\r\ndate: {_date()}\r\n{more}{connection}\r\n"
        ).encode("latin-1", "replace")


_now = (0, "")


def _date() -> str:
    global _now
    second = int(time.time())
    if _now[0] != second:
        _now = (second, formatdate(second, usegmt=True))
    return _now[1]
