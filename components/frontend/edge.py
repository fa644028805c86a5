"""The server side of a connection, where aiohttp leaves things open: errors of its parser have our body and a request id and
cost no traceback in the log; a client that opens a connection and never sends a request is let go."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from aiohttp import web

from components.frontend.errors import Refusal

log = logging.getLogger("gateway")

HEAD_S = 30.0
"""Seconds a new connection may take to bring its first request's head."""


class Edge(web.RequestHandler):
    """One connection."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._late = asyncio.get_running_loop().call_later(HEAD_S, self._look)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        if not self._request_count and self.transport is not None:
            self.transport.abort()

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        name = str(uuid.uuid4())
        if status >= 500:
            log.error("request %s: %s", name, exc, exc_info=exc)
            message = f"the gateway failed; its log has request {name}"
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        text = " ".join((message or "not understood").split())[:300]
        response = Refusal(status, "internal_error" if status >= 500 else "bad_http", text).response(name)
        response.force_close()
        return response


async def listen(runner: web.AppRunner, host: str, port: int) -> asyncio.Server:
    """Accept connections for a runner that is set up. Raises OSError."""
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None
    return await loop.create_server(
        lambda: Edge(server, loop=loop, access_log=None, keepalive_timeout=75.0, auto_decompress=False),  # type: ignore[arg-type]
        host,
        port,
        backlog=1024,
    )
