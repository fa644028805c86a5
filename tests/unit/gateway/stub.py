"""A stand-in for Dynamo's frontend and for our router, scripted per test; and a gateway before them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from components.frontend.app import applications
from components.frontend.config import GatewayConfig
from components.frontend.gateway import Gateway
from components.frontend.prompt import Renderer

MODEL = Path(__file__).resolve().parents[3] / ".state/models/tiny-full"
SERVED = "m"
Script = Callable[[web.Request, "Seen"], Awaitable[web.StreamResponse]]


@cache
def renderer() -> Renderer:
    return Renderer(str(MODEL))


class Seen:
    def __init__(self, request: web.Request, body: dict[str, Any]) -> None:
        self.path, self.headers, self.body = request.path, {k.lower(): v for k, v in request.headers.items()}, body


def chunk(text: str, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}], **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
IDS = {"nvext": {"worker_id": {"prefill_worker_id": 7, "decode_worker_id": 9}}}


async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
    """What a healthy frontend does."""
    if not seen.body.get("stream"):
        usage = {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        return web.json_response(
            {"choices": [{"message": {"content": "a b"}}], "usage": usage, **IDS},
            dumps=lambda v: json.dumps(v, separators=(",", ":")),
        )
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for part in (chunk("a"), chunk("b"), DONE):
        await response.write(part)
    return response


def error(status: int, message: str = "Failed to generate completions") -> Script:
    async def script(_: web.Request, __: Seen) -> web.StreamResponse:
        return web.json_response({"message": message, "type": "x", "code": status}, status=status)

    return script


class FakeFrontend:
    """`scripts` are used up one per request; then `answer` serves. `listed` = models of /v1/models."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.seen: list[Seen] = []
        self.listed = [SERVED]
        self.gone = asyncio.Event()
        self.live: asyncio.Event | None = None
        """Set: /live answers; None: always."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/{rest:.*}", self._post)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/live", self._live)
        return app

    async def _live(self, _: web.Request) -> web.Response:
        if self.live is not None:
            await self.live.wait()
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": m} for m in self.listed]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request, await request.json())
        self.seen.append(seen)
        script = self.scripts.pop(0) if self.scripts else answer
        try:
            return await script(request, seen)
        except (ConnectionError, asyncio.CancelledError):
            self.gone.set()
            raise


class FakeRouter:
    """Answers every question with `decision` after `delay_s`; None = never."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.decision: dict[str, Any] = {"prefill": 7, "overlap_blocks": 2}
        self.delay_s: float | None = 0.0
        self.messages: list[dict[str, Any]] = []
        self.got = asyncio.Condition()
        self.server: asyncio.Server | None = None

    async def start(self) -> None:
        self.server = await asyncio.start_unix_server(self._connection, str(self.path))

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            message = msgspec.json.decode(line)
            async with self.got:
                self.messages.append(message)
                self.got.notify_all()
            if message["op"] == "decide" and self.delay_s is not None:
                await asyncio.sleep(self.delay_s)
                writer.write(msgspec.json.encode(self.decision | {"n": message["n"]}) + b"\n")
        writer.close()

    async def wait_for(self, op: str) -> dict[str, Any]:
        async with self.got:
            await asyncio.wait_for(self.got.wait_for(lambda: any(m["op"] == op for m in self.messages)), 5)
        return next(m for m in self.messages if m["op"] == op)


class Stage(AsyncExitStack):
    """`async with Stage(tmp, router=True, **GatewayConfig fields) as s`: s.client talks to s.gateway before s.frontend."""

    def __init__(self, directory: Path, *, router: bool = False, **config: Any) -> None:
        super().__init__()
        self.directory, self.with_router, self.config = directory, router, config
        self.frontend = FakeFrontend()

    async def __aenter__(self) -> Stage:
        await super().__aenter__()
        server = TestServer(self.frontend.app())
        await server.start_server()
        self.push_async_callback(server.close)
        fields: dict[str, Any] = {
            "name": "g", "upstream": str(server.make_url("")), "served_model": SERVED, "model_path": str(MODEL), "max_model_len": 512, "block_size": 16,
            "auth": "none", "router_deadline_ms": 1000, "health_every_s": 1e-9,
        }  # fmt: skip
        if self.with_router:
            self.router = FakeRouter(self.directory / "r.sock")
            await self.router.start()
            fields["router"] = f"unix:{self.router.path}"
        self.gateway = Gateway(GatewayConfig(**(fields | self.config)))
        self.gateway.renderer = renderer()
        await self.gateway.open()
        self.push_async_callback(self.gateway.close)
        if self.with_router:
            await asyncio.wait_for(self.gateway.asker.up.wait(), 5)  # type: ignore[union-attr]
        api = TestServer(applications(self.gateway)[0])
        await api.start_server()
        self.client = TestClient(api)
        self.push_async_callback(self.client.close)
        return self

    async def chat(self, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any, Any]:
        """(status, JSON or text, headers)."""
        body = {"model": SERVED, "messages": [{"role": "user", "content": "hello"}]} | body
        async with self.client.post("/v1/chat/completions", json=body, headers=headers or {}) as r:
            text = await r.text()
            return r.status, json.loads(text) if r.content_type == "application/json" else text, r.headers
