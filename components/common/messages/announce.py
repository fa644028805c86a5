"""Announcements over NATS: a version was promoted or rolled back, a tenant was purged.

An announcement says "look now", never what is true: who hears one reads the registry or the purge generations, as it
would have done by itself a little later. So it needs no signature, may be lost (core NATS delivers at most once) and
may be repeated. Without NATS everything holds, later: generations are read every few seconds, channels at the next start.

    dynamo_blob.promoted   {kind, model, version, at}        `dynamo release promote | rollback`
    dynamo_blob.purged     {kind, tenant, generation, at}    `dynamo purge`, once the generation is raised
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, ValidationError

from components.common.config import Config

log = logging.getLogger("dynamo_blob.announce")

MAX_BYTES, PENDING = 4096, 64
CONNECT_S, PING_S = 2, 10
GAP_S = 0.2
"""Seconds between two actions at least: somebody who floods the subject costs five looks a second, no more."""

Kind = Literal["promoted", "purged"]


class Announcement(Config):
    kind: Kind
    model: str = Field("", max_length=96, description="promoted: model whose channel moved")
    version: str = Field("", max_length=64, description="promoted: what is current now, as the sender saw it")
    tenant: str = Field("", max_length=32, description="purged: hash of the tenant, 32 hex digits; never its name")
    generation: int = Field(0, ge=0, description="purged: the tenant's generation from now on")
    at: float = Field(default_factory=time.time, description="sender's clock, Unix seconds")

    @property
    def subject(self) -> str:
        return f"dynamo_blob.{self.kind}"


Act = Callable[[Announcement | None], None]
"""Called in the listener's thread; None = look anyway, something may have been missed. May block for a bounded time."""


def publish(url: str, item: Announcement, deadline_s: float = 3.0) -> str:
    """Announce `item`; "" when the server has it, else why not. Never raises, never takes longer than the deadline."""
    import nats

    async def send() -> None:
        client = await nats.connect(url, connect_timeout=CONNECT_S, allow_reconnect=False, error_cb=_quiet)
        try:
            await client.publish(item.subject, item.model_dump_json().encode())
            await client.flush(timeout=CONNECT_S)  # a pong: the server has read it
        finally:
            await client.close()

    try:
        asyncio.run(asyncio.wait_for(send(), deadline_s))
        return ""
    except Exception as e:
        return f"{url}: {type(e).__name__}: {e}"[:300].rstrip(": ")


async def _quiet(_: Exception) -> None:
    """The failure itself is raised where it matters."""


class Listener:
    """Hears one kind of announcement in a daemon thread; connects, and goes on connecting, by itself.

    Bounded: `PENDING` messages wait, further ones are dropped (those that wait say the same); one action at a time,
    `GAP_S` apart; messages of the same content waiting together are one. After each connection it acts once on None.
    """

    def __init__(self, url: str, kind: Kind, act: Act, name: str) -> None:
        self.url, self.kind, self.act, self.name = url, kind, act, name
        self.counts: Counter[str] = Counter()
        self.connected = False
        self.last_error = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._queue: asyncio.Queue[Announcement | None]
        self._thread = threading.Thread(target=self._run, name=f"announce-{kind}", daemon=True)

    def start(self) -> Listener:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop listening; waits a few seconds at most for an action under way."""
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def status(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "kind": self.kind,
            "connected": self.connected,
            "last_error": self.last_error,
            **self.counts,
        }

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass
        except Exception as e:  # a defect of ours or of the client must not end the component
            self._failed(e)
            log.warning("%s hears no announcements any more: %s", self.name, self.last_error)

    async def _main(self) -> None:
        import nats

        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._queue = asyncio.Queue(PENDING)
        client = await nats.connect(  # -1: it never gives up, at the start neither
            self.url, name=self.name, connect_timeout=CONNECT_S, reconnect_time_wait=1.0, max_reconnect_attempts=-1,
            ping_interval=PING_S, max_outstanding_pings=2, error_cb=self._error, disconnected_cb=self._lost, reconnected_cb=self._back,
        )  # fmt: skip
        try:
            await client.subscribe(f"dynamo_blob.{self.kind}", cb=self._hear, pending_msgs_limit=PENDING)
            await client.flush(timeout=CONNECT_S)
            await self._back()
            while True:
                await self._next()
        finally:
            self.connected = False
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), CONNECT_S)

    async def _next(self) -> None:
        waiting = {_key(item := await self._queue.get()): item}
        while not self._queue.empty():
            item = self._queue.get_nowait()
            waiting[_key(item)] = item
        for item in waiting.values():
            try:
                await asyncio.to_thread(self.act, item)
                self.counts["acted"] += 1
            except Exception as e:
                self.counts["failed"] += 1
                self._failed(e)
                log.warning("%s: an announcement could not be acted on: %s", self.name, self.last_error)
            await asyncio.sleep(GAP_S)

    async def _hear(self, message: Any) -> None:
        self.counts["heard"] += 1
        try:
            if len(message.data) > MAX_BYTES:
                raise ValueError(f"{len(message.data)} bytes")
            item = Announcement.model_validate_json(message.data)
            if item.kind != self.kind:
                raise ValueError(f"{item.kind} on {message.subject}")
        except (ValidationError, ValueError) as e:
            self.counts["refused"] += 1
            self._failed(e)
            return
        self._put(item)

    def _put(self, item: Announcement | None) -> None:
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull:
            self.counts["dropped"] += 1

    async def _back(self) -> None:
        self.connected = True
        self.counts["connections"] += 1
        self._put(None)

    async def _lost(self) -> None:
        self.connected = False

    async def _error(self, error: Exception) -> None:
        self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.last_error = f"{type(error).__name__}: {error}"[:300]


class Heard:
    """Both kinds, for components that hold nothing of a release or of a tenant's KV that they could drop: each
    announcement is logged, and the newest of each kind stands in the component's status. No url = nothing is heard."""

    def __init__(self, url: str, name: str) -> None:
        self.newest: dict[str, dict[str, Any]] = {}
        self._name = name
        kinds: tuple[Kind, ...] = ("promoted", "purged") if url else ()
        self.listeners = [Listener(url, kind, self._act, name).start() for kind in kinds]

    def _act(self, item: Announcement | None) -> None:
        if item is None:
            return
        self.newest[item.kind] = item.model_dump(exclude_defaults=True)
        if item.kind == "promoted":
            log.info(
                "%s: %s %s is current now; what is served here stays until a restart",
                self._name,
                item.model,
                item.version,
            )
        else:
            log.info("%s: tenant %s is purged up to generation %d", self._name, item.tenant, item.generation)

    def status(self) -> dict[str, Any]:
        """{kind: the newest announcement}, and whether it is listening."""
        return {"listening": bool(self.listeners) and all(x.connected for x in self.listeners), **self.newest}

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()


def _key(item: Announcement | None) -> tuple[str, ...]:
    return () if item is None else (item.kind, item.model, item.tenant)
