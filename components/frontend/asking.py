"""Asking the router: never later than the deadline, never an error. No answer is "no pin"."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from typing import Protocol

import aiohttp
import msgspec
from pydantic import ValidationError

from components.common.messages.router import Decision, Note

log = logging.getLogger("gateway")

PENDING_LIMIT = 1024
BUFFER_LIMIT = 4 * 2**20
"""Bytes waiting in the socket to the router; beyond it the router is too slow to be worth asking."""


class Asker(Protocol):
    @property
    def connected(self) -> bool: ...

    async def open(self) -> None: ...

    async def decide(self, rid: str, ids: list[int], salt: str, max_tokens: int) -> Decision | None:
        """None = no advice in time."""

    def note(self, note: Note) -> None: ...

    async def close(self) -> None: ...


def asker(address: str, deadline_s: float) -> Asker | None:
    """`unix:/path`, `http://host:port`, or "" for none."""
    if not address:
        return None
    return (
        LineAsker(address.removeprefix("unix:"), deadline_s)
        if address.startswith("unix:")
        else HttpAsker(address, deadline_s)
    )


class LineAsker:
    """JSON lines over a Unix socket. One connection, kept by a task that reconnects with back-off."""

    def __init__(self, path: str, deadline_s: float) -> None:
        self.path, self.deadline_s = path, deadline_s
        self.up = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._pending: dict[int, asyncio.Future[Decision]] = {}
        self._numbers = itertools.count(1)
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._writer is not None

    async def open(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def decide(self, rid: str, ids: list[int], salt: str, max_tokens: int) -> Decision | None:
        writer = self._writer
        if (
            writer is None
            or writer.is_closing()
            or len(self._pending) >= PENDING_LIMIT
            or writer.transport.get_write_buffer_size() > BUFFER_LIMIT
        ):
            return None
        n = next(self._numbers)
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._pending[n] = answer
        question = {"op": "decide", "n": n, "rid": rid, "ids": ids, "salt": salt, "max_tokens": max_tokens}
        try:
            writer.write(msgspec.json.encode(question) + b"\n")
            async with asyncio.timeout(self.deadline_s):
                return await answer
        except (TimeoutError, ConnectionError, RuntimeError):  # uvloop: a write to a transport just closed
            return None
        finally:
            self._pending.pop(n, None)

    def note(self, note: Note) -> None:
        writer = self._writer
        if writer is None or writer.is_closing() or writer.transport.get_write_buffer_size() > BUFFER_LIMIT:
            return
        with contextlib.suppress(RuntimeError, ConnectionError):  # the router died just now: only its hint is lost
            writer.write(msgspec.json.encode(note.model_dump(exclude_defaults=True)) + b"\n")

    async def _keep(self) -> None:
        wait = 0.05
        while True:
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(self.path, limit=2**20), 1.0)
            except (OSError, TimeoutError):
                await asyncio.sleep(wait)
                wait = min(wait * 2, 1.0)
                continue
            wait, self._writer = 0.05, writer
            self.up.set()
            try:
                await self._read(reader)
            except (OSError, ValueError) as e:
                log.warning("router: %s", e)
            finally:
                self._writer = None
                self.up.clear()
                writer.close()
                for future in self._pending.values():
                    if not future.done():
                        future.set_exception(ConnectionError("the router went away"))
                self._pending.clear()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            try:
                decision = Decision.model_validate(msgspec.json.decode(line))
            except (msgspec.DecodeError, ValidationError) as e:
                raise ValueError(f"an answer that is none: {str(e).splitlines()[0]}") from None
            future = self._pending.get(decision.n)
            if future is not None and not future.done():
                future.set_result(decision)


class HttpAsker:
    """POST /v1/decide and /v1/note, for clusters."""

    def __init__(self, base: str, deadline_s: float) -> None:
        self.base, self.deadline_s = base.rstrip("/"), deadline_s
        self._answered = False
        self._session: aiohttp.ClientSession | None = None
        self._notes: asyncio.Queue[bytes] = asyncio.Queue(4096)
        self._task: asyncio.Task[None] | None = None
        self._pause_until = 0.0

    @property
    def connected(self) -> bool:
        return self._answered

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=64), timeout=aiohttp.ClientTimeout(total=5)
        )
        self._task = asyncio.create_task(self._send_notes())

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._session:
            await self._session.close()

    async def decide(self, rid: str, ids: list[int], salt: str, max_tokens: int) -> Decision | None:
        if self._session is None or time.monotonic() < self._pause_until:
            return None
        question = msgspec.json.encode(
            {"op": "decide", "n": 0, "rid": rid, "ids": ids, "salt": salt, "max_tokens": max_tokens}
        )
        try:
            async with (
                asyncio.timeout(self.deadline_s),
                self._session.post(
                    self.base + "/v1/decide", data=question, headers={"content-type": "application/json"}
                ) as answer,
            ):
                if answer.status != 200:
                    return None
                self._answered = True
                return Decision.model_validate(msgspec.json.decode(await answer.read()))
        except TimeoutError:
            return None
        except (aiohttp.ClientError, OSError, ValueError):  # nobody there: do not ask on every request
            self._answered = False
            self._pause_until = time.monotonic() + 0.5
            return None

    def note(self, note: Note) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._notes.put_nowait(msgspec.json.encode(note.model_dump(exclude_defaults=True) | {"op": note.op}))

    async def _send_notes(self) -> None:
        assert self._session is not None
        while True:
            note = await self._notes.get()
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._session.post(
                    self.base + "/v1/note", data=note, headers={"content-type": "application/json"}
                ):
                    pass
