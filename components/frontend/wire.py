"""HTTP/1.1 to Dynamo's frontend: one connection, one exchange at a time, and nothing between its bytes and ours.

A general client costs more than all the rest of the gateway (0.7 ms of CPU per streamed answer against 0.2 here):
a timer, a stream object and a task's wake-up for every chunk. Here chunk frames are taken off in `data_received`,
and after the first byte the payload goes straight on to whoever is attached.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from typing import Any, cast

TCP_QUICKACK = getattr(socket, "TCP_QUICKACK", None)
HEAD_LIMIT = 65536
"""Bytes of an answer's head, and of one chunk's size line or trailer."""

HELD_LIMIT = 262_144
"""Payload bytes nobody has taken yet beyond which reading pauses."""

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: [^\r\n]*)?")
_SIZE = re.compile(rb"[0-9a-fA-F]{1,8}[ \t]*(?:;[^\r\n]*)?")


class Broken(ConnectionError):
    """The connection ended before the answer did, or the answer is no HTTP. `silent`: not one byte of it came."""

    def __init__(self, why: str, silent: bool = False) -> None:
        super().__init__(why)
        self.silent = silent


class Answer:
    """What came back for one request. `status` is set once the head is here (`await head()`)."""

    def __init__(self, connection: Connection, idle_s: float) -> None:
        self.connection, self.idle_s = connection, idle_s
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self.held = False
        """Reading is paused: the sink is full, or nobody takes what is here."""
        self._loop = connection.loop
        self._error: Exception | None = None
        self._buffer = b""
        self._parts: list[bytes] = []
        self._size = 0
        self._sink: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._chunked, self._left, self._frame_end, self._trailer = False, 0, False, False
        self._reusable = True
        self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._heard + idle_s, self._look)

    # -- for the caller

    async def head(self) -> None:
        """Wait for status and headers. Raises Broken, TimeoutError."""
        while not self.status:
            await self._wait()

    async def readany(self) -> bytes:
        """Payload that is here, else the next; b"" at the end. Raises Broken, TimeoutError."""
        while not self._parts:
            if self.done:
                return b""
            await self._wait()
        if self.held:
            self.resume()
        return self.taken()

    async def read(self, limit: int = 2**62) -> bytes:
        """The whole payload, its first `limit` bytes at most."""
        out = b""
        while len(out) < limit and (part := await self.readany()):
            out += part
        return out[:limit]

    def attach(self, sink: Callable[[bytes], bool]) -> None:
        """From now on payload goes to `sink`; False from it pauses reading. What arrives together with the answer's
        end is left to `taken()`, so that it can be sent on in one piece with whatever ends the caller's own answer."""
        self._sink = sink
        if self.done or not self._parts:
            return
        if not sink(self.taken()):
            self._hold()
        elif self.held:
            self.resume()

    async def flowed(self) -> None:
        """Wait until the answer is done or the sink is full (`held`). Raises Broken, TimeoutError."""
        if not (self.done or self.held):
            await self._wait()

    def taken(self) -> bytes:
        """Payload that is here and was not passed on; b"" for none."""
        parts, self._parts, self._size = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def resume(self) -> None:
        self.held, self._heard = False, self._loop.time()
        self.connection.resume()

    def release(self) -> None:
        """Give the connection back; one with an unfinished answer is closed, so that the frontend stops its workers."""
        if self.connection.answer is not self:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.connection.free(self.done and self._reusable and self._error is None)

    # -- for the connection

    def feed(self, data: bytes) -> None:
        self._heard = self.connection.heard_at = self._loop.time()
        news = not self.status
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        try:
            while not self.status:
                end = data.find(b"\r\n\r\n")
                if end < 0:
                    if len(data) > HEAD_LIMIT:
                        raise Broken("the answer's head has no end")
                    self._buffer = data
                    return
                self._read_head(data[:end])
                data = data[end + 4 :]
            if self.done:
                body, self._reusable = b"", self._reusable and not data
            else:
                body = self._dechunk(data) if self._chunked else self._counted(data)
        except Broken as e:
            self.fail(e)
            return
        if body:
            if self._sink is not None and not self.done:
                if self._sink(body):
                    return
                self._hold()
            else:
                self._parts.append(body)
                self._size += len(body)
                if self._size > HELD_LIMIT and not self.done:
                    self._hold()
        elif not (news or self.done):
            return
        self._wake()

    def fail(self, error: Exception) -> None:
        if not self.done and self._error is None:
            self._error = error
            self._wake()

    def lost(self, why: BaseException | None) -> None:
        """The connection is gone."""
        if self.status and not self._chunked and self._left < 0 and why is None and not self.done:
            self.done, self._reusable = True, False  # an answer that ends with its connection
            self._wake()
            return
        self.fail(Broken("the connection was closed", silent=not self.status and not self._buffer))

    # -- within

    def _read_head(self, head: bytes) -> None:
        first, _, rest = head.partition(b"\r\n")
        found = _STATUS.fullmatch(first)
        if not found:
            raise Broken("the answer is no HTTP/1.1")
        status = int(found[2])
        headers: dict[str, str] = {}
        for line in rest.split(b"\r\n") if rest else ():
            name, colon, value = line.partition(b":")
            if not colon:
                raise Broken("a header line without a colon")
            headers[name.strip().lower().decode("latin-1")] = value.strip().decode("latin-1")
        if status < 200:
            return  # 100 Continue and its like: the answer is still to come
        self.status, self.headers = status, headers
        connection = headers.get("connection", "").lower()
        self._reusable = "close" not in connection and (found[1] == b"1" or "keep-alive" in connection)
        if status in (204, 304):
            self._finish()
        elif "transfer-encoding" in headers:
            if headers["transfer-encoding"].lower() != "chunked":
                raise Broken("a transfer encoding that is not chunked")
            self._chunked = True
        elif "content-length" in headers:
            if not headers["content-length"].isdecimal():
                raise Broken("a content-length that is none")
            self._left = int(headers["content-length"])
            if not self._left:
                self._finish()
        else:
            self._left = -1

    def _counted(self, data: bytes) -> bytes:
        if self._left < 0:
            return data
        if len(data) > self._left:
            data, self._reusable = data[: self._left], False
        self._left -= len(data)
        if not self._left:
            self._finish()
        return data

    def _dechunk(self, data: bytes) -> bytes:
        out: list[bytes] = []
        at, size = 0, len(data)
        while at < size:
            if self._left:
                part = data[at : at + self._left]
                out.append(part)
                at += len(part)
                self._left -= len(part)
                self._frame_end = not self._left
                continue
            if self._frame_end:
                if size - at < 2:
                    break
                if data[at : at + 2] != b"\r\n":
                    raise Broken("a chunk without its end")
                at, self._frame_end = at + 2, False
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if size - at > HEAD_LIMIT:
                    raise Broken("a chunk's size line has no end")
                break
            line, at = data[at:end], end + 2
            if self._trailer:
                if not line:
                    self._finish()
                    self._reusable = self._reusable and at == size
                    return out[0] if len(out) == 1 else b"".join(out)
            elif not _SIZE.fullmatch(line):
                raise Broken("a chunk without a size")
            else:
                self._left = int(line.split(b";")[0], 16)
                self._trailer = not self._left
        self._buffer = data[at:]
        return out[0] if len(out) == 1 else b"".join(out)

    def _finish(self) -> None:
        self.done = True

    def _hold(self) -> None:
        if not self.held:
            self.held = True
            self.connection.pause()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._parts:
            raise self._error

    def _look(self) -> None:
        """One timer for the whole answer, looked at when the last byte could be too old."""
        self._timer = None
        if self.done or self._error is not None:
            return
        now = self._loop.time()
        if self.held:
            self._heard = now
        if now >= self._heard + self.idle_s:
            self.fail(TimeoutError(f"no byte for {self.idle_s:g} s"))
        else:
            self._timer = self._loop.call_at(self._heard + self.idle_s, self._look)


class Connection(asyncio.Protocol):
    """`on_free(connection, usable)` is called when an exchange is over or the idle connection was lost."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_free: Callable[[Connection, bool], None]) -> None:
        self.loop, self.on_free = loop, on_free
        self.answer: Answer | None = None
        self.idle_since = 0.0
        self.heard_at = 0.0
        self._transport: asyncio.Transport | None = None
        self._socket: Any = None
        self._paused = False

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, idle_s: float) -> Answer:
        """`idle_s`: seconds without a byte after which the answer has failed."""
        assert self.answer is None
        self.answer = Answer(self, idle_s)
        if self._transport is None:
            self.answer.fail(Broken("the connection was closed", silent=True))
        else:
            self._transport.write(request)
        return self.answer

    def free(self, usable: bool) -> None:
        self.answer = None
        usable = usable and self.open
        if usable:
            self.resume()
        else:
            self.close()
        self.idle_since = self.loop.time()
        self.on_free(self, usable)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._paused:
            self._paused = False
            self._transport.resume_reading()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._socket = transport.get_extra_info("socket") if TCP_QUICKACK is not None else None

    def data_received(self, data: bytes) -> None:
        # Acknowledge at once. Dynamo's frontend holds small writes back until the last one is acknowledged; a delayed ACK
        # costs 40 ms per answer on a reused connection. The kernel clears the option, so it is set after every read.
        if self._socket is not None:
            try:
                self._socket.setsockopt(socket.IPPROTO_TCP, TCP_QUICKACK, 1)
            except OSError:
                self._socket = None
        if self.answer is None:
            self.close()  # bytes nobody asked for
            return
        self.answer.feed(data)

    def eof_received(self) -> None:
        return None  # the transport closes itself

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = self._socket = None
        if self.answer is not None:
            self.answer.lost(exc)
        else:
            self.on_free(self, False)
