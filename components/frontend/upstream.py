"""Dynamo's frontend as the gateway's client sees it: replicas, deadlines, connections kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from components.common.errors import DynamoBlobError
from components.frontend.config import GatewayConfig
from components.frontend.wire import Answer, Broken, Connection

DOWN_S = 1.0
"""Seconds a replica that refused a connection is passed over."""

KEEP_S = 20.0
"""Seconds an idle connection is kept."""

KEEP_MOST = 256
"""Idle connections kept per replica."""


class UpstreamGone(Exception):
    """No replica took the request: nothing was sent, a retry is safe."""


class Unreachable(OSError):
    """One replica cannot be connected."""


class Replica:
    """One frontend's address and its idle connections, the youngest last."""

    def __init__(self, base: str) -> None:
        parts = urlsplit(base)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise DynamoBlobError(
                "GATEWAY-BAD-UPSTREAM",
                "an upstream is http://host:port",
                where=base,
                do="give the address of Dynamo's frontend",
            )
        self.base, self.host, self.port, self.path = base, parts.hostname, parts.port, parts.path.rstrip("/")
        self.down_until = 0.0
        self.frozen = False
        """It takes connections and answers nothing (`pulse`)."""
        self.idle: list[Connection] = []
        self.busy: set[Connection] = set()

    def take(self) -> Connection | None:
        """An idle connection that is still good."""
        while self.idle:
            connection = self.idle.pop()
            if connection.open and connection.loop.time() - connection.idle_since < KEEP_S:
                self.busy.add(connection)
                return connection
            connection.close()
        return None

    async def dial(self, deadline_s: float) -> Connection:
        """A new connection. Raises OSError, TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(deadline_s):
            _, connection = await loop.create_connection(lambda: Connection(loop, self._freed), self.host, self.port)
        self.busy.add(connection)
        return connection

    @property
    def heard_at(self) -> float:
        """The loop's time when the last byte came from it."""
        return max((c.heard_at for c in (*self.busy, *self.idle)), default=0.0)

    def freeze(self, why: str) -> None:
        """Whatever waits for it fails."""
        self.frozen = True
        for connection in tuple(self.busy):
            if connection.answer is not None:
                connection.answer.fail(TimeoutError(why))

    def _freed(self, connection: Connection, usable: bool) -> None:
        self.busy.discard(connection)
        if usable and len(self.idle) < KEEP_MOST:
            self.idle.append(connection)
        else:
            if connection in self.idle:
                self.idle.remove(connection)
            connection.close()

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        lines = [f"{method} {self.path}{path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items() if not _controls(value)]
        return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body

    def close(self) -> None:
        for connection in (*self.idle, *self.busy):
            connection.close()


class Upstreams:
    """Replicas in turn. A replica that cannot be connected is passed over for `DOWN_S`, then tried again."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.replicas = [Replica(u.rstrip("/")) for u in (config.upstream, *config.more_upstreams)]
        self._turn = 0

    async def close(self) -> None:
        for replica in self.replicas:
            replica.close()

    def order(self) -> Sequence[Replica]:
        """Every replica, the next in turn first, those thought down last."""
        if len(self.replicas) == 1:
            return self.replicas
        self._turn = (self._turn + 1) % len(self.replicas)
        turned = self.replicas[self._turn :] + self.replicas[: self._turn]
        now = time.monotonic()
        return sorted(turned, key=lambda r: r.frozen or r.down_until > now)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str], skip: str = "") -> tuple[str, Answer]:
        """(replica, answer with its head read; `release` it). Raises UpstreamGone when none takes the request, Broken,
        TimeoutError.

        A connection that ends before the first byte of an answer counts as not connected: a kept one is replaced by a
        new one to the same replica, after a new one the next replica is tried, the only one once more.
        """
        replicas = [r for r in self.order() if r.base != skip] or list(self.replicas)
        last: Exception | None = None
        for replica in replicas if len(replicas) > 1 else replicas * 2:
            try:
                return replica.base, await self._ask(replica, replica.request("POST", path, headers, body))
            except (Unreachable, Broken) as e:
                if isinstance(e, Broken) and not e.silent:
                    raise
                last = e
        raise UpstreamGone(str(last))

    async def _ask(self, replica: Replica, request: bytes) -> Answer:
        """The answer, its head read. Raises Unreachable, Broken, TimeoutError."""
        if replica.frozen:
            raise Unreachable(f"{replica.base} does not answer")
        return await self._exchange(replica, request)

    async def ask_alive(self, replica: Replica) -> None:
        """Any answer at all from this replica, frozen or not. Raises OSError; the caller sets the deadline."""
        (await self._exchange(replica, replica.request("GET", "/live", {}, b""))).release()

    async def _exchange(self, replica: Replica, request: bytes) -> Answer:
        connection = replica.take()
        while True:
            kept = connection is not None
            if connection is None:
                connection = await self._dial(replica)
            answer = connection.send(request, self.config.idle_deadline_s)
            try:
                await answer.head()
            except Broken as e:
                answer.release()
                if kept and e.silent:
                    connection = None
                    continue
                raise
            except BaseException:
                answer.release()
                raise
            replica.down_until = 0.0
            return answer

    async def _dial(self, replica: Replica) -> Connection:
        try:
            return await replica.dial(self.config.connect_deadline_s)
        except (OSError, TimeoutError) as e:
            replica.down_until = time.monotonic() + DOWN_S
            raise Unreachable(f"{replica.base}: {e or 'no connection in time'}") from None

    async def get_json(self, path: str, deadline_s: float) -> Any:
        """The JSON of the first replica that answers 200; None when none does."""
        for replica in self.order():
            try:
                async with asyncio.timeout(deadline_s):
                    answer = await self._ask(replica, replica.request("GET", path, {}, b""))
                    try:
                        body = await answer.read()
                    finally:
                        answer.release()
                if answer.status == 200:
                    return msgspec.json.decode(body)
            except (OSError, TimeoutError, msgspec.DecodeError):
                continue
        return None


def _controls(value: str) -> bool:
    """A value that would end its own header line."""
    return "\r" in value or "\n" in value or "\0" in value
