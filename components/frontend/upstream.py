"""Dynamo's frontend as the gateway's client sees it: replicas, deadlines, quick ACKs."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from components.frontend.config import GatewayConfig

TCP_QUICKACK = getattr(socket, "TCP_QUICKACK", None)
DOWN_S = 1.0
"""Seconds a replica that refused a connection is passed over."""


class UpstreamGone(Exception):
    """No replica took the request: nothing was sent, a retry is safe."""


class Upstreams:
    """Replicas in turn. A replica that cannot be connected is passed over for `DOWN_S`, then tried again."""

    def __init__(self, config: GatewayConfig) -> None:
        self.bases = (config.upstream.rstrip("/"), *(u.rstrip("/") for u in config.more_upstreams))
        self.config = config
        self._down: dict[str, float] = {}
        self._turn = 0
        self.session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        c = self.config
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=20),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=c.connect_deadline_s, sock_read=c.idle_deadline_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    def order(self) -> Sequence[str]:
        """Every replica, the next in turn first, those thought down last."""
        self._turn = (self._turn + 1) % len(self.bases)
        turned = self.bases[self._turn :] + self.bases[: self._turn]
        now = time.monotonic()
        return sorted(turned, key=lambda b: self._down.get(b, 0.0) > now)

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], skip: str = ""
    ) -> tuple[str, aiohttp.ClientResponse]:
        """(replica, response with headers read). Raises UpstreamGone when none connects; other errors as aiohttp's own.

        A reused connection that the replica closed meanwhile counts as not connected: aiohttp tells by
        ServerDisconnectedError before any byte of the answer; then the next replica, at last the same one anew, is tried.
        """
        assert self.session is not None
        bases = [b for b in self.order() if b != skip] or list(self.bases)
        last: Exception | None = None
        for base in (*bases, bases[0]) if len(bases) == 1 else bases:
            try:
                response = await self.session.post(base + path, data=body, headers=headers)
            except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as e:
                last = e
                if isinstance(e, aiohttp.ClientConnectorError):
                    self._down[base] = time.monotonic() + DOWN_S
                continue
            self._down.pop(base, None)
            return base, response
        raise UpstreamGone(str(last))

    async def get_json(self, path: str, deadline_s: float) -> Any:
        """The JSON of the first replica that answers 200; None when none does."""
        assert self.session is not None
        for base in self.order():
            try:
                async with self.session.get(base + path, timeout=aiohttp.ClientTimeout(total=deadline_s)) as r:
                    if r.status == 200:
                        return await r.json(content_type=None)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                continue
        return None


def quick_ack(response: aiohttp.ClientResponse) -> None:
    """Acknowledge at once. Dynamo's frontend holds small writes back until the last one is acknowledged; a delayed
    ACK costs 40 ms per answer on a reused connection. The kernel clears the option, so it is set after every read."""
    connection = response.connection  # None once the body is complete
    if TCP_QUICKACK is None or connection is None or connection.transport is None:
        return
    sock = connection.transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, TCP_QUICKACK, 1)
