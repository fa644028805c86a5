"""A few lines of HTTP for probes and small questions: one request, bounded in time and size. No client library,
because the launcher asks several processes several times a second while they fight for the CPU to start."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple
from urllib.parse import urlsplit

MOST_BYTES = 8 << 20


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.body)


def target(url: str) -> tuple[str, str, int, str]:
    """(Unix socket or "", host, port, path) of ``http://host:port/path`` or ``unix:/socket:/path``."""
    if url.startswith("unix:"):
        sock, _, path = url[5:].partition(":")
        return sock, "", 0, path or "/"
    parts = urlsplit(url)
    return "", parts.hostname or "", parts.port or 80, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


async def ask(url: str, body: Any = None, *, timeout_s: float = 2.0, headers: dict[str, str] | None = None) -> Answer:
    """GET, or POST `body` as JSON. Raises OSError, TimeoutError or ValueError (not HTTP)."""
    async with asyncio.timeout(timeout_s):
        return await _ask(url, body, headers or {})


async def _ask(url: str, body: Any, headers: dict[str, str]) -> Answer:
    sock, host, port, path = target(url)
    reader, writer = await (asyncio.open_unix_connection(sock) if sock else asyncio.open_connection(host, port))
    try:
        data = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
            f"Host: {host or 'localhost'}",
            "Connection: close",
        ]
        lines += [f"{k}: {v}" for k, v in headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await writer.drain()
        return await _read(reader)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split()[1])
    fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if ":" in line)}
    if "content-length" in fields:
        return Answer(status, await reader.readexactly(min(int(fields["content-length"]), MOST_BYTES)), fields)
    if fields.get("transfer-encoding", "").lower() != "chunked":
        return Answer(status, await reader.read(MOST_BYTES), fields)
    parts: list[bytes] = []
    while sum(map(len, parts)) < MOST_BYTES:
        size = int((await reader.readline()).split(b";")[0] or b"0", 16)
        if not size:
            break
        parts.append(await reader.readexactly(size))
        await reader.readline()
    return Answer(status, b"".join(parts), fields)
