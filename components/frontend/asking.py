"""Asking the router: never later than the deadline, never an error. No answer is "no pin"."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import Protocol

import aiohttp
import msgspec
from pydantic import ValidationError

from components.common.messages.router import Decision, Note

log = logging.getLogger("gateway")

PENDING_LIMIT = 1024
BUFFER_LIMIT = 4 * 2**20
"""Bytes waiting in the socket to the router; beyond it the router is too slow to be worth asking."""

LINE_LIMIT = 2**20
"""Bytes of an answer."""

NOTE_S = 0.005
"""Seconds a note may wait for others."""


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
    """JSON lines over a Unix socket. One connection, kept by a task that reconnects with back-off.

    Notes wait up to `NOTE_S` for company: most answers of a few tokens are over by then, and a `done` says all that
    their `first` would have said. The router wakes once, and not while the answer is on its way.
    """

    def __init__(self, path: str, deadline_s: float) -> None:
        self.path, self.deadline_s = path, deadline_s
        self.up = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, asyncio.Future[Decision | None]] = {}
        self._numbers = itertools.count(1)
        self._task: asyncio.Task[None] | None = None
        self._notes: dict[str, Note] = {}

    @property
    def connected(self) -> bool:
        return self._transport is not None

    async def open(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        self._flush()
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def decide(self, rid: str, ids: list[int], salt: str, max_tokens: int) -> Decision | None:
        if not self._writable() or len(self._pending) >= PENDING_LIMIT:
            return None
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        n = next(self._numbers)
        answer: asyncio.Future[Decision | None] = loop.create_future()
        self._pending[n] = answer
        late = loop.call_later(self.deadline_s, _give_up, answer)
        question = {"op": "decide", "n": n, "rid": rid, "ids": ids, "salt": salt, "max_tokens": max_tokens}
        try:
            self._transport.write(msgspec.json.encode(question) + b"\n")
            return await answer
        except (ConnectionError, RuntimeError):  # uvloop: a write to a transport just closed
            return None
        finally:
            late.cancel()
            self._pending.pop(n, None)

    def note(self, note: Note) -> None:
        if not self._notes:
            asyncio.get_running_loop().call_later(NOTE_S, self._flush)
        self._notes[note.rid] = note

    def _flush(self) -> None:
        notes, self._notes = self._notes, {}
        if notes and self._writable():
            assert self._transport is not None
            lines = (msgspec.json.encode(n.model_dump(exclude_defaults=True)) + b"\n" for n in notes.values())
            with contextlib.suppress(RuntimeError, ConnectionError):  # the router died just now: only its hint is lost
                self._transport.write(b"".join(lines))

    def _writable(self) -> bool:
        t = self._transport
        return t is not None and not t.is_closing() and t.get_write_buffer_size() <= BUFFER_LIMIT

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        wait = 0.05
        while True:
            try:
                async with asyncio.timeout(1.0):
                    transport, line = await loop.create_unix_connection(lambda: _Line(self._answered), self.path)
            except OSError:
                await asyncio.sleep(wait)
                wait = min(wait * 2, 1.0)
                continue
            wait, self._transport = 0.05, transport
            self.up.set()
            try:
                why = await line.ended
                if why:
                    log.warning("router: %s", why)
            finally:
                self._transport = None
                self.up.clear()
                transport.abort()
                for future in self._pending.values():
                    _give_up(future)
                self._pending.clear()

    def _answered(self, line: bytes) -> None:
        """Raises ValueError."""
        try:
            decision = Decision.model_validate(msgspec.json.decode(line))
        except (msgspec.DecodeError, ValidationError) as e:
            raise ValueError(f"an answer that is none: {str(e).splitlines()[0]}") from None
        future = self._pending.get(decision.n)
        if future is not None and not future.done():
            future.set_result(decision)


class _Line(asyncio.Protocol):
    """Lines of one connection; `ended` says why it is over ("" = closed)."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self.on_line = on_line
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            for line in lines:
                self.on_line(line)
            if len(self._rest) > LINE_LIMIT:
                raise ValueError("an answer without an end")
        except ValueError as e:
            self._end(str(e))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end(str(exc) if exc else "")

    def _end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)


def _give_up(answer: asyncio.Future[Decision | None]) -> None:
    if not answer.done():
        answer.set_result(None)


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
