"""A fault proxy before a blob store, in a thread: rules decide per request what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Rule:
    """What happens to requests whose method is in `methods` and whose path contains `match`.

    kind: status (arg = HTTP code), delay (arg = seconds), hang, half (half of the request's body goes to the store, then it hangs), reset, stall (after arg body bytes), cut (after arg body
    bytes), truncate (arg bytes fewer, told honestly), flip (a byte at arg), other (arg = path of another object), throttle (bytes/s),
    hold (the whole request, until `heal`; then it goes on),
    upstream (arg = port of another store that answers)
    """

    kind: str
    arg: float | str = 0
    match: str = ""
    methods: tuple[str, ...] = ("GET", "PUT", "HEAD", "DELETE", "POST")
    count: int = -1
    hits: int = 0

    def takes(self, method: str, path: str) -> bool:
        if method not in self.methods or self.match not in path or self.count == 0:
            return False
        self.count -= 1
        self.hits += 1
        return True


@dataclass
class Seen:
    method: str
    path: str
    at: float
    done: float = 0.0
    status: int = 0
    fault: str = ""


@dataclass
class FaultProxy:
    upstream: int
    port: int
    rules: list[Rule] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def __enter__(self) -> FaultProxy:
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stuck: set[asyncio.Task[None]] = set()
        self._healed = asyncio.Event()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(self._listen())
            ready.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert ready.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def fault(self, kind: str, arg: float | str = 0, **more: object) -> Rule:
        rule = Rule(kind, arg, **more)  # type: ignore[arg-type]
        self.rules.append(rule)
        return rule

    def heal(self) -> None:
        """No faults from now on; requests that hang or stall are cut."""
        self.rules.clear()

        def cut() -> None:
            for task in list(self._stuck):
                task.cancel()
            self._healed.set()
            self._healed = asyncio.Event()

        self._loop.call_soon_threadsafe(cut)

    def count(self, **want: object) -> int:
        return sum(all(getattr(s, k) == v for k, v in want.items()) for s in self.seen)

    async def _listen(self) -> asyncio.Server:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(reader, writer)
            writer.transport.abort()

        return await asyncio.start_server(accepted, "127.0.0.1", self.port, limit=1 << 20)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
                seen = Seen(method, path, time.monotonic())
                self.seen.append(seen)
                rule = next((r for r in self.rules if r.takes(method, path)), None)
                seen.fault = rule.kind if rule else ""
                if rule and rule.kind == "hang":
                    await self._forever()
                if rule and rule.kind == "reset":
                    return
                if _header(head, b"expect"):
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    head = b"\r\n".join(x for x in head.split(b"\r\n") if not x.lower().startswith(b"expect:"))
                body = await reader.readexactly(int(_header(head, b"content-length") or 0))
                if rule and rule.kind == "hold":
                    await self._healed.wait()
                if rule and rule.kind == "delay":
                    await asyncio.sleep(float(rule.arg))
                if rule and rule.kind == "throttle":
                    await asyncio.sleep(len(body) / float(rule.arg))
                if rule and rule.kind == "status":
                    seen.status = int(rule.arg)
                    writer.write(
                        f"HTTP/1.1 {seen.status} Fault\r\nx-ms-error-code: ServerBusy\r\nContent-Length: 0\r\n\r\n".encode()
                    )
                    continue
                if rule and rule.kind == "other":
                    head = head.replace(path.split("?")[0].encode(), str(rule.arg).encode(), 1)
                if (
                    up is not None
                ):  # one per request: the store closes an idle one after 5 s, and NIXL's put would wait 60 s
                    up[1].close()
                port = int(rule.arg) if rule and rule.kind == "upstream" else self.upstream
                up = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
                if rule and rule.kind == "half":
                    up[1].write(head + body[: len(body) // 2])
                    await self._forever()
                up[1].write(head + body)
                await self._answer(method, rule, seen, up[0], writer)
                seen.done = time.monotonic()
        finally:
            if up is not None:
                up[1].close()

    async def _answer(
        self, method: str, rule: Rule | None, seen: Seen, up: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = await up.readuntil(b"\r\n\r\n")
        seen.status = int(head.split(b" ", 2)[1])
        if (_header(head, b"transfer-encoding") or b"").lower() == b"chunked":
            writer.write(head)
            while True:
                line = await up.readline()
                size = int(line.strip() or b"0", 16)
                writer.write(line + await up.readexactly(size + 2))
                await writer.drain()
                if size == 0:
                    return
        nbytes = int(_header(head, b"content-length") or 0)
        if method == "HEAD" or seen.status in (204, 304):
            nbytes = 0
        body = bytearray(await up.readexactly(nbytes))
        kind, arg = (rule.kind, rule.arg) if rule and seen.status < 300 and body else ("", 0)
        if kind == "flip":
            body[min(int(arg), len(body) - 1)] ^= 0x40
        if kind == "truncate":
            head = head.replace(f"ontent-length: {nbytes}".encode(), f"ontent-length: {nbytes - int(arg)}".encode())
            head = head.replace(f"ontent-Length: {nbytes}".encode(), f"ontent-Length: {nbytes - int(arg)}".encode())
            body = body[: nbytes - int(arg)]
        writer.write(head)
        if kind in ("stall", "cut"):
            writer.write(bytes(body[: int(arg)]))
            await writer.drain()
            if kind == "stall":
                await self._forever()
            await asyncio.sleep(0.05)
            raise ConnectionResetError
        if kind == "throttle":
            for at in range(0, len(body), 65536):
                writer.write(bytes(body[at : at + 65536]))
                await writer.drain()
                await asyncio.sleep(65536 / float(arg))
            return
        writer.write(bytes(body))
        await writer.drain()

    async def _forever(self) -> None:
        task = asyncio.current_task()
        self._stuck.add(task)
        try:
            await asyncio.sleep(3600)
        finally:
            self._stuck.discard(task)


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        if line.lower().startswith(name + b":"):
            return line.split(b":", 1)[1].strip()
    return None


Until = Callable[[], bool]


def wait_for(what: Until, timeout: float = 10.0, why: str = "", every: float = 0.005) -> None:
    """Poll a condition until it holds; fails the test when it does not within `timeout` seconds."""
    end = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < end, f"not within {timeout} s: {why or what}"
        time.sleep(every)
