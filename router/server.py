"""How the router is asked: JSON lines over a Unix socket, the same objects over HTTP in a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from pydantic import ValidationError

from components.common.errors import DynamoBlobError
from components.common.messages.router import Decide, Decision, Note
from router.decide import Decider

log = logging.getLogger("router")

LINE_LIMIT = 16 * 2**20
"""Bytes of one message: a question of about two million tokens."""

PENDING_LIMIT = 1024
"""Questions one connection may have open; more wait in the socket, so a flood costs the flooder."""


class LineServer:
    """One message per line; answers carry the question's `n` and may come in any order."""

    def __init__(self, decider: Decider) -> None:
        self.decider = decider
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, path: str) -> asyncio.Server:
        """Listen on `path`, replacing a socket a dead predecessor left. Raises ROUTER-SOCKET-BUSY for a live one."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        await _clear(path)
        server = await asyncio.start_unix_server(self._connection, path, limit=LINE_LIMIT)
        os.chmod(path, 0o600)
        return server

    async def close(self) -> None:
        for writer in list(self._writers):
            writer.close()
        for task in list(self._tasks):
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        room = asyncio.Semaphore(PENDING_LIMIT)
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                try:
                    message = parse(msgspec.json.decode(line))
                except (ValueError, ValidationError) as e:
                    log.warning("a message that is none: %s", str(e).splitlines()[0])
                    break
                if isinstance(message, Note):
                    self.decider.note(message)
                    continue
                await room.acquire()
                self.decider.expect(message.rid)
                task = asyncio.create_task(self._answer(message, writer, room))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (ConnectionError, ValueError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, question: Decide, writer: asyncio.StreamWriter, room: asyncio.Semaphore) -> None:
        try:
            decision = await self.decider.decide(question)
            if not writer.is_closing():
                writer.write(encode(decision))
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            room.release()


def parse(raw: Any) -> Decide | Note:
    op = raw.get("op") if isinstance(raw, dict) else None
    return Decide.model_validate(raw) if op == "decide" else Note.model_validate(raw)


def encode(decision: Decision) -> bytes:
    return msgspec.json.encode(decision.model_dump(exclude_defaults=True) | {"n": decision.n}) + b"\n"


async def _clear(path: str) -> None:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_unix_connection(path), 1.0)
    except FileNotFoundError:
        return
    except (OSError, TimeoutError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    writer.close()
    raise DynamoBlobError(
        "ROUTER-SOCKET-BUSY",
        "another router answers on this socket",
        where=path,
        do="stop it, or give this one another socket",
    )


def http_app(decider: Decider, status: Any, audit: Any = None) -> web.Application:
    """/health, /metrics, /status, /audit (blocks the index holds per worker; slow); and /v1/decide, /v1/note for clusters. `status()` gives the JSON of /status."""
    app = web.Application(client_max_size=LINE_LIMIT)

    async def health(_: web.Request) -> web.Response:
        state = status()
        return web.json_response(state, status=200 if state["ready"] else 503)

    async def metrics(_: web.Request) -> web.Response:
        decider.sweep()
        return web.Response(body=decider.metrics.exposition(), headers={"content-type": "text/plain; version=0.0.4"})

    async def decide(request: web.Request) -> web.Response:
        try:
            decision = await decider.decide(Decide.model_validate(await request.json()))
        except (ValueError, ValidationError) as e:
            return web.json_response({"code": "ROUTER-BAD-MESSAGE", "what": str(e).splitlines()[0]}, status=400)
        return web.Response(body=encode(decision), content_type="application/json")

    async def note(request: web.Request) -> web.Response:
        try:
            decider.note(Note.model_validate(await request.json()))
        except (ValueError, ValidationError) as e:
            return web.json_response({"code": "ROUTER-BAD-MESSAGE", "what": str(e).splitlines()[0]}, status=400)
        return web.Response(status=204)

    async def audited(_: web.Request) -> web.Response:
        return web.json_response(await audit() if audit else {})

    app.router.add_get("/health", health)
    app.router.add_get("/audit", audited)
    app.router.add_get("/status", lambda _: _json(status()))
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/v1/decide", decide)
    app.router.add_post("/v1/note", note)
    return app


async def _json(value: Any) -> web.Response:
    return web.json_response(value)
