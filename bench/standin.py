"""A fast stand-in for Azure Blob: one directory tree, thread per connection, sendfile.

    python -m bench.standin PORT ROOT [BYTES_PER_SECOND [CERT KEY]]       all answers together no faster than this; TLS

It serves ROOT/<container>/<blob> for GET, HEAD and PUT with what clients need: `x-ms-range` before
`Range`, `100 Continue`, ETag, Content-Range, the x-ms-* headers that NIXL and the SDK ask for. No
authentication, no listing. It measures clients; Azurite is the reference for behaviour.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

_TURN = 1 << 18  # bytes that go at once when the rate is bounded
_DATE = "Sun, 29 Nov 2026 14:00:00 GMT"
_COMMON = (
    f"x-ms-blob-type: BlockBlob\r\nAccept-Ranges: bytes\r\nContent-Type: application/octet-stream\r\nx-ms-version: 2025-07-05\r\n"
    f"x-ms-creation-time: {_DATE}\r\nLast-Modified: {_DATE}\r\nDate: {_DATE}\r\nx-ms-lease-status: unlocked\r\n"
    f"x-ms-lease-state: available\r\nx-ms-server-encrypted: true\r\nx-ms-request-server-encrypted: true\r\nx-ms-request-id: 1\r\n"
)


class StandIn:
    """`served`: body bytes sent, by ``container/blob``. `account` is the first path segment, dropped when present."""

    def __init__(
        self,
        root: Path | str,
        port: int = 0,
        account: str = "standin",
        rate: float = 0.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.root, self.account, self.tls = Path(root), account, tls
        self.rate = rate  # bytes per second of all answers together; 0 = as fast as it goes
        self._paid = 0.0  # until when the link is busy
        self.served: Counter[str] = Counter()
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._files: dict[str, tuple[int, int, str]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.account}"

    def start(self) -> StandIn:
        threading.Thread(target=self.run, name="standin", daemon=True).start()
        return self

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for fd, _, _ in self._files.values():
                os.close(fd)
            self._files.clear()

    def forget(self) -> None:
        """Look at the files again: they were changed behind our back."""
        with self._lock:
            self._files.clear()

    def _file(self, name: str) -> tuple[int, int, str]:
        with self._lock:
            if name not in self._files:
                fd = os.open(self.root / name, os.O_RDONLY)
                info = os.fstat(fd)
                self._files[name] = (fd, info.st_size, f'"0x{info.st_mtime_ns & 0xFFFFFFFFFFFFFFF:X}"')
            return self._files[name]

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = b""
        try:
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_side=True)
            while True:
                while b"\r\n\r\n" not in buffer:
                    data = connection.recv(65536)
                    if not data:
                        return
                    buffer += data
                head, buffer = buffer.split(b"\r\n\r\n", 1)
                lines = head.decode("latin-1").split("\r\n")
                method, target, _ = lines[0].split(" ", 2)
                fields = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
                name = unquote(target.split("?")[0]).lstrip("/").removeprefix(f"{self.account}/")
                self.requests += 1
                if ".." in name.split("/"):
                    return
                if target == "/__served__":
                    with self._lock:
                        body = json.dumps(dict(self.served)).encode()
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                    continue
                if method == "PUT":
                    buffer = self._put(connection, name, fields, buffer)
                else:
                    self._get(connection, method, name, fields)
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _get(self, connection: socket.socket, method: str, name: str, fields: dict[str, str]) -> None:
        try:
            fd, size, etag = self._file(name)
        except OSError:
            connection.sendall(b"HTTP/1.1 404 NotFound\r\nx-ms-error-code: BlobNotFound\r\nContent-Length: 0\r\n\r\n")
            return
        wanted = fields.get("x-ms-range") or fields.get("range")
        begin, end, status, extra = 0, size, "200 OK", ""
        if wanted:
            first, _, last = wanted.partition("=")[2].partition("-")
            begin, end = int(first), min(int(last) + 1, size) if last else size
            if begin >= size:
                connection.sendall(
                    b"HTTP/1.1 416 InvalidRange\r\nx-ms-error-code: InvalidRange\r\nContent-Length: 0\r\n\r\n"
                )
                return
            status, extra = "206 Partial Content", f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n"
        head = f"HTTP/1.1 {status}\r\nContent-Length: {end - begin}\r\nETag: {etag}\r\n{extra}{_COMMON}\r\n"
        connection.sendall(head.encode())
        if method == "HEAD":
            return
        with self._lock:  # counted first: a client that has its bytes may look at once
            self.served[name] += end - begin
        try:
            while begin < end:
                sent = self._send(connection, fd, begin, self._turn(end - begin))
                if sent == 0:
                    raise OSError("the file shrank")
                begin += sent
        finally:
            with self._lock:
                self.served[name] -= end - begin

    def _send(self, connection: socket.socket, fd: int, begin: int, nbytes: int) -> int:
        if self.tls is None:
            return os.sendfile(connection.fileno(), fd, begin, nbytes)
        data = os.pread(fd, min(nbytes, 1 << 20), begin)
        connection.sendall(data)
        return len(data)

    def _turn(self, nbytes: int) -> int:
        """How many bytes may go now; with a rate, waits for their turn on the link."""
        if not self.rate:
            return nbytes
        nbytes = min(nbytes, _TURN)
        with self._lock:
            now = time.monotonic()
            self._paid = max(self._paid, now - _TURN / self.rate) + nbytes / self.rate
            wait = self._paid - now
        if wait > 0:
            time.sleep(wait)
        return nbytes

    def _put(self, connection: socket.socket, name: str, fields: dict[str, str], buffer: bytes) -> bytes:
        if fields.get("expect"):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        left = int(fields.get("content-length", "0"))
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        work = target.with_name(f".{target.name}.{threading.get_ident()}")
        with work.open("wb") as f:
            f.write(buffer[:left])
            rest, left = buffer[left:], left - len(buffer[:left])
            piece = memoryview(bytearray(1 << 20))
            while left:
                got = connection.recv_into(piece, min(left, len(piece)))
                if got == 0:
                    raise OSError("the connection closed in a body")
                f.write(piece[:got])
                left -= got
        os.replace(work, target)
        with self._lock:
            self._files.pop(name, None)
        connection.sendall(f'HTTP/1.1 201 Created\r\nContent-Length: 0\r\nETag: "0x1"\r\n{_COMMON}\r\n'.encode())
        return rest


def main() -> int:
    if len(sys.argv) not in (3, 4, 6):
        print(__doc__, file=sys.stderr)
        return 2
    tls = None
    if len(sys.argv) == 6:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*sys.argv[4:])
    StandIn(sys.argv[2], int(sys.argv[1]), rate=float(sys.argv[3]) if len(sys.argv) > 3 else 0.0, tls=tls).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
