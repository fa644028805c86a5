"""A minimal HTTP/1.1 client for streaming answers, cheap enough not to be what is measured.

One blocking socket per connection; sets TCP_QUICKACK only when asked, so that a server's dependence on the
client's ACKs shows.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """Seconds to the first byte of the body, to its end; status; body without chunk framing."""

    first_s: float
    total_s: float
    status: int
    body: bytes


class Connection:
    def __init__(self, port: int, *, quick_ack: bool = False, timeout_s: float = 30.0, host: str = "127.0.0.1") -> None:
        self.host, self.port, self.quick, self.timeout_s = host, port, quick_ack, timeout_s
        self.sock: socket.socket | None = None

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
        """Connects when there is no connection; the connect counts into the times."""
        started = time.perf_counter()
        if self.sock is None:
            self.sock = socket.create_connection((self.host, self.port), self.timeout_s)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw = json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            f"host: {self.host}",
            "content-type: application/json",
            f"content-length: {len(raw)}",
        ]
        lines += [f"{k}: {v}" for k, v in (headers or {}).items()]
        self.sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._recv()
        head, _, rest = data.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            while not rest:
                rest = self._recv()
            first = time.perf_counter() - started
            while not (rest.endswith(b"\r\n0\r\n\r\n") or rest == b"0\r\n\r\n"):
                rest += self._recv()
            body_bytes = _dechunk(rest)
        else:
            length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
            first = time.perf_counter() - started
            while len(rest) < length:
                rest += self._recv()
            body_bytes = rest
        total = time.perf_counter() - started
        if b"connection: close" in lower:
            self.close()
        return Answer(first, total, status, body_bytes)

    def _recv(self) -> bytes:
        assert self.sock is not None
        data = self.sock.recv(65536)
        if not data:
            self.close()
            raise ConnectionError("the server closed the connection")
        if self.quick:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return data


def _dechunk(raw: bytes) -> bytes:
    out = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        n = int(size, 16)
        if n == 0:
            break
        out.append(raw[:n])
        raw = raw[n + 2 :]
    return b"".join(out)
