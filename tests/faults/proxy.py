"""A seeded HTTP proxy that breaks things on purpose, and counts every request and byte outside our own code.

    proxy = FaultProxy("127.0.0.1", 10000, seed=7, log=path).start()
    proxy.rules = [Rule("busy", match=r"GET .*/objects/", times=3)]

As a process:  python -m tests.faults.proxy PORT UPSTREAM_PORT [--seed N] [--log FILE]
(PUT http://127.0.0.1:PORT/__faults__ with a JSON list of rules changes them, GET shows rules and totals).

Kinds of fault (`Rule.kind`), applied to requests whose "METHOD target" matches:

    busy       503 ServerBusy              throttle   429 with Retry-After `seconds` (0 = no header)
    expired    403 AuthenticationFailed    forbidden  403 AuthorizationPermissionMismatch
    status     `status`, no body           missing    404 BlobNotFound
    delay      `seconds` before the answer cap        `rate` bytes per second for the body
    stall      `after` body bytes, then silence until the client gives up
    cut        `after` body bytes, then a clean close reset      a TCP reset at once (after = -1) or after `after` bytes
    truncate   a consistent answer that is `by` bytes too short, as if the blob were shorter
    flip       one bit of the body at `after` (seeded when -1)
    other      the bytes of the blob `target` instead, same range
    zero       the body is all zero bytes
    garbage    something that is not HTTP

The log has one JSON line per request: {n, t, method, target (without query), range, status, sent, fault}.
`sent` counts body bytes that left the proxy towards the client; a request stands in totals and log before its last
bytes leave.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

_BLOCK = 1 << 18
_CANNED = {
    "busy": (503, "ServerBusy"), "throttle": (429, "ServerBusy"), "expired": (403, "AuthenticationFailed"),
    "forbidden": (403, "AuthorizationPermissionMismatch"), "missing": (404, "BlobNotFound"), "status": (0, "Injected"),
}  # fmt: skip
KINDS = (*_CANNED, "delay", "cap", "stall", "cut", "reset", "truncate", "flip", "other", "zero", "garbage")


@dataclass
class Rule:
    """`times`: most applications (-1 = for ever); `skip`: matching requests let through first; `chance`: per request."""

    kind: str
    match: str = r"GET "
    times: int = -1
    skip: int = 0
    chance: float = 1.0
    seconds: float = 0.0
    rate: float = 0.0
    after: int = 0
    by: int = 1
    status: int = 500
    target: str = ""
    seen: int = 0
    used: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault '{self.kind}'; there are {', '.join(KINDS)}")
        re.compile(self.match)


class Head(NamedTuple):
    first: str
    fields: dict[str, str]
    raw: bytes

    @property
    def length(self) -> int:
        return int(self.fields.get("content-length", "0") or 0)


class Dropped(Exception):
    """The connection to the client is over."""


class FaultProxy:
    """Listens on 127.0.0.1; thread per connection. `requests`, `body_bytes`, `by_target` and `faults` are totals."""

    def __init__(self, host: str, port: int, *, listen: int = 0, seed: int = 0, log: Path | str | None = None) -> None:
        self.upstream = (host, port)
        self._rules: list[Rule] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._log = open(log, "a", buffering=1) if log else None  # noqa: SIM115
        self._listener = socket.create_server(("127.0.0.1", listen), backlog=512)
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        self.requests = self.body_bytes = self.active = self.peak = 0
        self.by_target: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.entries: list[dict[str, Any]] = []
        self._recorded: set[int] = set()

    @property
    def rules(self) -> list[Rule]:
        return self._rules

    @rules.setter
    def rules(self, rules: list[Rule]) -> None:
        with self._lock:
            self._rules = rules

    def url(self, account: str) -> str:
        return f"http://127.0.0.1:{self.port}/{account}"

    def start(self) -> FaultProxy:
        threading.Thread(target=self.run, name="fault-proxy", daemon=True).start()
        return self

    def run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for s in self._open:
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_RDWR)
        if self._log:
            self._log.close()
            self._log = None

    def __enter__(self) -> FaultProxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pick(self, line: str) -> Rule | None:
        with self._lock:
            for rule in self._rules:
                if not re.search(rule.match, line):
                    continue
                rule.seen += 1
                if rule.seen <= rule.skip or rule.used == rule.times or self._random.random() >= rule.chance:
                    continue
                rule.used += 1
                self.faults[rule.kind] += 1
                return rule
        return None

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        buffer = bytearray()
        try:
            while not self._closed.is_set():
                head = _read_head(client, buffer)
                if head is None:
                    return
                if " /__faults__" in head.first:
                    self._control(client, head, _read_body(client, buffer, head.length))
                    continue
                server = self._exchange(client, head, buffer, server)
        except (OSError, ValueError, Dropped):
            pass
        finally:
            with self._lock:
                self._open.discard(client)
            client.close()
            if server is not None:
                server.close()

    def _exchange(
        self, client: socket.socket, head: Head, buffer: bytearray, server: socket.socket | None
    ) -> socket.socket | None:
        method, target, _ = head.first.split(" ", 2)
        rule = self._pick(f"{method} {target.split('?')[0]}")
        entry = {
            "n": 0, "t": time.time(), "method": method, "target": target.split("?")[0], "status": 0, "sent": 0,
            "range": head.fields.get("x-ms-range") or head.fields.get("range", ""), "fault": rule.kind if rule else "",
        }  # fmt: skip
        with self._lock:
            self.requests += 1
            self.active += 1
            self.peak = max(self.peak, self.active)
            entry["n"] = self.requests
        try:
            if head.fields.get("expect"):
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = _read_body(client, buffer, head.length)
            if rule and self._answer_alone(client, rule, entry, method):
                return server
            return self._forward(client, head, body, server, rule, entry, method)
        finally:
            self._record(entry)
            with self._lock:
                self.active -= 1

    def _record(self, entry: dict[str, Any]) -> None:
        """Once per request, and before its last bytes leave: who has the whole answer finds it counted."""
        with self._lock:
            if entry["n"] in self._recorded:
                return
            self._recorded.add(entry["n"])
            self.body_bytes += entry["sent"]
            self.by_target[entry["target"]] += entry["sent"]
            self.entries.append(entry)
            if self._log:
                self._log.write(json.dumps(entry) + "\n")

    def _answer_alone(self, client: socket.socket, rule: Rule, entry: dict[str, Any], method: str) -> bool:
        """Faults that need no upstream. True if the request was answered."""
        if rule.kind in _CANNED:
            status, code = _CANNED[rule.kind]
            status = status or rule.status
            entry["status"] = status
            self._record(entry)
            retry = f"Retry-After: {rule.seconds:g}\r\n" if rule.kind == "throttle" and rule.seconds else ""
            client.sendall(
                f"HTTP/1.1 {status} Injected\r\nx-ms-error-code: {code}\r\n{retry}Content-Length: 0\r\n\r\n".encode()
            )
            return True
        if rule.kind == "garbage":
            client.sendall(b"\x00\xffSSH-2.0-nothing\r\n\r\n")
            raise Dropped
        if rule.kind == "reset" and rule.after < 0:
            _reset(client)
            raise Dropped
        if rule.kind == "delay":
            self._closed.wait(rule.seconds)
        return False

    def _forward(
        self, client: socket.socket, head: Head, body: bytes, server: socket.socket | None, rule: Rule | None, entry: dict[str, Any], method: str
    ) -> socket.socket:  # fmt: skip
        lines = [line for line in head.raw.split(b"\r\n") if not line.lower().startswith(b"expect:")]
        if rule and rule.kind == "other":
            _, target, version = lines[0].split(b" ", 2)
            lines[0] = b" ".join([method.encode(), rule.target.encode() + b"?" + target.partition(b"?")[2], version])
        answer = None
        for fresh in (False, True):
            if server is None or fresh:
                server = socket.create_connection(self.upstream, timeout=60)
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rest = bytearray()
            try:
                server.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
                answer = _read_head(server, rest)
            except OSError:
                answer = None
            if answer is not None:
                break
            server.close()
        if answer is None:
            raise Dropped
        entry["status"] = int(answer.first.split(" ")[1])
        if answer.fields.get("transfer-encoding", "").lower() == "chunked":
            client.sendall(answer.raw + b"\r\n\r\n")
            _copy_chunked(server, client, rest, entry, self._record)
            return server
        length = 0 if method == "HEAD" or entry["status"] in (204, 304) else answer.length
        raw = answer.raw
        if rule and rule.kind == "truncate" and length:
            kept = max(0, length - rule.by)
            raw = re.sub(rb"(?im)^content-length:[^\r\n]*", b"Content-Length: %d" % kept, raw)
            client.sendall(raw + b"\r\n\r\n")
            self._body(server, client, rest, length, entry, rule, stop=kept)
            return server
        if not length:
            self._record(entry)
        client.sendall(raw + b"\r\n\r\n")
        self._body(server, client, rest, length, entry, rule, stop=length)
        return server

    def _body(
        self, server: socket.socket, client: socket.socket, rest: bytearray, length: int, entry: dict[str, Any], rule: Rule | None, stop: int
    ) -> None:  # fmt: skip
        kind = rule.kind if rule else ""
        flip = -1
        if rule and kind == "flip" and length:
            flip = rule.after if rule.after >= 0 else self._random.randrange(length)
        at, began = 0, time.monotonic()
        while at < length:
            data = bytes(rest[: length - at]) or server.recv(min(_BLOCK, length - at))
            del rest[: len(data)]
            if not data:
                raise Dropped
            if rule and kind in ("stall", "cut", "reset") and at + len(data) >= rule.after:
                self._send(client, data[: rule.after - at], entry)
                if kind == "reset":
                    _reset(client)
                elif kind == "stall":
                    self._until_gone(client)
                raise Dropped
            if at <= flip < at + len(data):
                changed = bytearray(data)
                changed[flip - at] ^= 1 << self._random.randrange(8)
                data = bytes(changed)
            if kind == "zero":
                data = bytes(len(data))
            if rule and kind == "cap":
                due = began + (at + len(data)) / rule.rate
                self._closed.wait(max(0.0, due - time.monotonic()))
            self._send(client, data[: max(0, stop - at)], entry, last=at + len(data) >= stop)
            at += len(data)

    def _send(self, client: socket.socket, data: bytes, entry: dict[str, Any], last: bool = False) -> None:
        if last:
            entry["sent"] += len(data)
            self._record(entry)
            client.sendall(data)
            return
        client.sendall(data)
        entry["sent"] += len(data)

    def _until_gone(self, client: socket.socket) -> None:
        client.settimeout(0.1)
        while not self._closed.is_set():
            try:
                if not client.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return

    def _control(self, client: socket.socket, head: Head, body: bytes) -> None:
        if head.first.startswith("PUT"):
            self.rules = [Rule(**r) for r in json.loads(body)]
        with self._lock:
            state = {
                "rules": [asdict(r) for r in self._rules], "requests": self.requests, "body_bytes": self.body_bytes,
                "by_target": dict(self.by_target), "faults": dict(self.faults),
            }  # fmt: skip
        data = json.dumps(state).encode()
        client.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )


def _read_head(source: socket.socket, buffer: bytearray) -> Head | None:
    while (at := buffer.find(b"\r\n\r\n")) < 0:
        data = source.recv(65536)
        if not data:
            return None
        buffer += data
    raw = bytes(buffer[:at])
    del buffer[: at + 4]
    lines = raw.decode("latin-1").split("\r\n")
    return Head(
        lines[0], {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}, raw
    )


def _read_body(source: socket.socket, buffer: bytearray, length: int) -> bytes:
    while len(buffer) < length:
        data = source.recv(_BLOCK)
        if not data:
            raise Dropped
        buffer += data
    body = bytes(buffer[:length])
    del buffer[:length]
    return body


def _copy_chunked(
    server: socket.socket, client: socket.socket, rest: bytearray, entry: dict[str, Any], record: Callable[[dict[str, Any]], None]
) -> None:  # fmt: skip
    def line() -> bytes:
        while b"\r\n" not in rest:
            data = server.recv(_BLOCK)
            if not data:
                raise Dropped
            rest.extend(data)
        found, _, _ = bytes(rest).partition(b"\r\n")
        del rest[: len(found) + 2]
        return found

    while True:
        size = line()
        count = int(size.split(b";")[0], 16)
        data = _read_body(server, rest, count + 2)
        if count == 0:
            record(entry)
        client.sendall(size + b"\r\n" + data)
        entry["sent"] += count
        if count == 0:
            return


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("upstream_port", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", default=None)
    args = parser.parse_args()
    FaultProxy("127.0.0.1", args.upstream_port, listen=args.port, seed=args.seed, log=args.log).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
