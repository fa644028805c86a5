"""Ranged GETs straight into memory: the bulk read path of weights.

Raw sockets instead of the SDK: one request costs about 0.2 CPU-seconds per GB instead of 1.1-1.9, and
bytes land where they are needed. No retries here: the caller owns the retry budget and knows other sources.

Contract of `RangeReader.read_into`: it returns only when the view is filled with exactly the bytes that
the store sent for that range; otherwise it raises `StorageError`, by the deadline (within a tick of 0.2 s).
The view's content is then undefined. Nobody writes to the view after it returned or raised.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from components.common.storage.config import AccountConfig
from components.common.storage.credentials import Credential, open_credential
from components.common.storage.errors import StorageError, from_exception, from_http
from components.common.storage.names import Name

TICK_S = 0.2  # how long one receive may block before deadlines are looked at
PIECE = (
    2 << 20
)  # bytes handed to `on_bytes` at a time: few changes of hand of the interpreter, and still in a cache when hashed
_VERSION = "2021-12-02"


class RangeReader:
    """Thread-safe; keeps at most `pool` idle connections to one account."""

    def __init__(self, config: AccountConfig, credential: Credential | None = None, *, pool: int = 64) -> None:
        self.config = config
        self.url = config.url.rstrip("/")
        self.credential = credential or open_credential(config.credential, self.url)
        parts = urlsplit(self.url)
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._name = Name(self._host, self._port)
        self._netloc = parts.netloc
        self._ssl = ssl.create_default_context(cafile=config.ca_bundle or None) if self._tls else None
        self._idle: list[_Connection] = []
        self._pool = pool
        self._lock = threading.Lock()
        self.requests = self.received = self.connects = 0

    def uri(self, container: str, blob: str) -> str:
        """URL of the blob without a signature."""
        return f"{self.url}/{container}/{quote(blob, safe='/~')}"

    def read_into(
        self, container: str, blob: str, offset: int, view: memoryview, *, deadline: float | None = None,
        on_bytes: Callable[[memoryview], Any] | None = None, stopped: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        """Fill `view` with bytes [offset, offset + len(view)) of the blob.

        deadline   time.monotonic() by which to be done; none = only stalls (read_timeout_s) end it.
        on_bytes   called with consecutive parts of `view` as they arrive (for digests).
        stopped    looked at between receives; when true the read is given up (STORAGE-TIMEOUT).
        """
        uri = self.uri(container, blob)
        end = deadline if deadline is not None else float("inf")
        try:
            for attempt in (1, 2):
                try:
                    return self._once(uri, offset, view, end, on_bytes, stopped)
                except StorageError as e:
                    if attempt == 2 or e.status not in (401, 403) or not self.credential.refresh():
                        raise
        except (OSError, ssl.SSLError, ValueError) as e:
            raise from_exception(e, uri, self.credential.identity) from None

    def read_small(self, container: str, blob: str, *, limit: int = 64 * 2**20, deadline: float | None = None) -> bytes:
        """The whole blob, at most `limit` bytes (STORAGE-REQUEST if it is larger): manifests, signatures, pointers."""
        uri = self.uri(container, blob)
        end = deadline if deadline is not None else time.monotonic() + self.config.read_timeout_s
        try:
            try:
                return self._small_once(uri, limit, end)
            except StorageError as e:
                if e.status not in (401, 403) or not self.credential.refresh():
                    raise
                return self._small_once(uri, limit, end)
        except (OSError, ssl.SSLError, ValueError) as e:
            raise from_exception(e, uri, self.credential.identity) from None

    def _small_once(self, uri: str, limit: int, end: float) -> bytes:
        connection, (status, fields, rest) = self._ask(self._request(*self.credential.sign(uri)), end)
        keep = False
        try:
            length = int(fields.get("content-length", "-1"))
            if status != 200:
                self._refuse(connection, uri, status, fields)
            if not 0 <= length <= limit:
                raise from_http(
                    400, "", uri, self.credential.identity, detail=f"{length} bytes, at most {limit} expected"
                )
            data = bytearray(length)
            connection.receive_body(memoryview(data), rest, end, self.config.read_timeout_s, None, None)
            self._count(length)
            keep = True
            return bytes(data)
        finally:
            self._give_back(connection, keep)

    def _request(self, signed: str, headers: dict[str, str], span: str = "") -> bytes:
        parts = urlsplit(signed)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        lines = [f"GET {target} HTTP/1.1", f"Host: {self._netloc}", f"x-ms-version: {_VERSION}"]
        if span:
            lines.append(f"x-ms-range: bytes={span}")
        return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.requests += 1
            self.received += nbytes

    def _once(
        self, uri: str, offset: int, view: memoryview, end: float, on_bytes: Callable[[memoryview], Any] | None,
        stopped: Callable[[], bool] | None,
    ) -> None:  # fmt: skip
        request = self._request(*self.credential.sign(uri), f"{offset}-{offset + len(view) - 1}")
        connection, answer = self._ask(request, end)
        keep = False
        try:
            status, fields, rest = answer
            length = int(fields.get("content-length", "-1"))
            if status != 206 and not (status == 200 and offset == 0 and length == len(view)):
                self._refuse(connection, uri, status, fields)
            if length != len(view):
                total = fields.get("content-range", "").rpartition("/")[2]
                raise StorageError(
                    "STORAGE-RANGE", "the blob is shorter than the manifest says", where=uri,
                    why=f"range {offset}-{offset + len(view) - 1} gave {length} bytes of a blob of {total or 'unknown'} bytes",
                    do="the blob was replaced or cut: verify the release", status=status, identity=self.credential.identity,
                )  # fmt: skip
            connection.receive_body(view, rest, end, self.config.read_timeout_s, on_bytes, stopped)
            self._count(length)
            keep = fields.get("connection", "").lower() != "close"
        finally:
            self._give_back(connection, keep)

    def _ask(self, request: bytes, end: float) -> tuple[_Connection, tuple[int, dict[str, str], bytes]]:
        """Send on an idle connection; a stale one (closed by the server while idle) costs one reconnect."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            fresh = connection is None
            if connection is None:
                connection = self._connect(end)
            try:
                connection.send(request)
                return connection, connection.receive_head(end, self.config.read_timeout_s)
            except (ConnectionError, ssl.SSLError, BrokenPipeError):
                connection.close()
                if fresh:
                    raise
            except BaseException:
                connection.close()
                raise

    def _connect(self, end: float) -> _Connection:
        left = min(self.config.connect_timeout_s, end - time.monotonic())
        if left <= 0:
            raise TimeoutError("no time left to connect")
        raw = self._name.connect(left)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self.connects += 1
        try:
            if self._ssl is not None:
                return _Connection(self._ssl.wrap_socket(raw, server_hostname=self._host), tls=True)
            return _Connection(raw, tls=False)
        except BaseException:
            raw.close()
            raise

    def _refuse(self, connection: _Connection, uri: str, status: int, fields: dict[str, str]) -> NoReturn:
        connection.broken = True  # what is left of the body is not read: not fit for reuse
        detail = "the server ignored the range" if status == 200 else ""
        raise from_http(
            status if status != 200 else 400, fields.get("x-ms-error-code", ""), uri, self.credential.identity,
            detail=detail, retry_after=fields.get("retry-after", ""),
        )  # fmt: skip

    def _give_back(self, connection: _Connection, keep: bool) -> None:
        with self._lock:
            if keep and not connection.broken and len(self._idle) < self._pool:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class _Connection:
    """One HTTP/1.1 connection. `broken` until an answer was read to its end."""

    def __init__(self, sock: socket.socket, tls: bool) -> None:
        self.sock, self.broken = sock, False
        if tls:
            sock.settimeout(TICK_S)
            self._flags = 0
        else:  # a blocking receive of a whole piece: one system call and one GIL hand-over per MiB
            sock.settimeout(None)
            timeval = struct.pack("ll", 0, int(TICK_S * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
            self._flags = socket.MSG_WAITALL

    def send(self, data: bytes) -> None:
        self.broken = True
        self.sock.sendall(data)

    def receive_head(self, end: float, stall_s: float) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower-case names) and the first bytes of the body."""
        head = b""
        buffer = bytearray(4096)
        while (at := head.find(b"\r\n\r\n")) < 0:
            got = self._receive(memoryview(buffer), 0, end, stall_s)
            if got == 0:
                raise ConnectionResetError("the connection closed before an answer")
            head += buffer[:got]
            if len(head) > 65536:
                raise ValueError("an answer header of more than 64 KiB")
        lines = head[:at].decode("latin-1").split("\r\n")
        try:
            status = int(lines[0].split(" ", 2)[1])
        except (IndexError, ValueError):
            raise ValueError(f"not an HTTP answer: {lines[0][:40]!r}") from None
        fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        if status == 100:
            raise ValueError("an unexpected 100 Continue")
        return status, fields, head[at + 4 :]

    def receive_body(
        self, view: memoryview, first: bytes, end: float, stall_s: float, on_bytes: Callable[[memoryview], Any] | None,
        stopped: Callable[[], bool] | None,
    ) -> None:  # fmt: skip
        if len(first) > len(view):
            raise ValueError("more bytes than were asked for")
        view[: len(first)] = first
        at, told, size = len(first), 0, len(view)
        while at < size:
            if stopped is not None and stopped():
                raise TimeoutError("given up by the caller")
            got = self._receive(view[at : min(size, told + PIECE)], self._flags, end, stall_s)
            if got == 0:
                raise ConnectionResetError(f"the connection closed after {at} of {size} bytes")
            at += got
            if on_bytes is not None and (at == size or at - told >= PIECE):
                on_bytes(view[told:at])
                told = at
            elif at - told >= PIECE:
                told = at
        if on_bytes is not None and told < size:
            on_bytes(view[told:])
        self.broken = False

    def _receive(self, view: memoryview, flags: int, end: float, stall_s: float) -> int:
        quiet_until = time.monotonic() + stall_s
        while True:
            now = time.monotonic()
            if now >= end:
                raise TimeoutError("the deadline of the range passed")
            if now >= quiet_until:
                raise TimeoutError(f"no byte for {stall_s:g} s")
            try:
                return self.sock.recv_into(view, len(view), flags)
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
                continue

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()
