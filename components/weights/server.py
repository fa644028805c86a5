"""The weight service's HTTP face (see components.common.messages.weights). One event loop; work happens in threads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from components.common.errors import DynamoBlobError
from components.weights.entry import Entry
from components.weights.handover import Handover
from components.weights.service import WeightService

log = logging.getLogger("dynamo_blob.weights")

_PULSE_S = 1.0  # a lease says something at least this often: silence means that the service is lost
_LEASE_LOOK_S = 0.25  # how soon the end of a lease is noticed
_LINGER_S = 1.0  # after a refusal: long enough for waiting workers to read the reason

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(service: WeightService) -> web.Application:
    app = web.Application(middlewares=[_errors])
    routes = Routes(service)
    app.add_routes([
        web.get("/health", routes.health), web.get("/v1/release", routes.release), web.get("/v1/manifest", routes.manifest),
        web.get("/v1/sources", routes.sources), web.get("/v1/status", routes.status),
        web.get("/v1/lease", routes.lease), web.get("/v1/peer/claim", routes.peer_claim), web.get("/v1/peer/range", routes.peer_range),
    ])  # fmt: skip
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except DynamoBlobError as e:
        status = 404 if e.code == "WEIGHTS-UNKNOWN-OBJECT" else 503
        return web.json_response(e.as_json(), status=status)


class Routes:
    def __init__(self, service: WeightService) -> None:
        self.service = service
        self._peers = ThreadPoolExecutor(64, thread_name_prefix="peer-offer")  # a waiting peer holds a thread
        self._claims = ThreadPoolExecutor(8, thread_name_prefix="peer-claim")  # never behind one that waits

    def _ready(self) -> WeightService:
        s = self.service
        if not s.ready:
            e = s.error or DynamoBlobError(
                "WEIGHTS-STARTING", "the weight service is resolving its release", where=s.config.name
            )
            raise DynamoBlobError(e.code, e.what, where=e.where, why=e.why, do=e.do, **{**e.data, "final": s.final})
        return s

    async def health(self, request: web.Request) -> web.Response:
        s = self._ready()
        return web.json_response({"name": s.config.name, "ready": True})

    async def release(self, request: web.Request) -> web.Response:
        release = self._ready().release
        assert release is not None
        return web.json_response(release.model_dump(mode="json"))

    async def manifest(self, request: web.Request) -> web.Response:
        found = self._ready().found
        assert found is not None
        return web.Response(body=found.manifest_bytes, content_type="application/json")

    async def sources(self, request: web.Request) -> web.Response:
        s = self._ready()
        s.count("sources_asked")
        return web.json_response(s.sources(request.query.get("object", "")).model_dump(mode="json"))

    async def lease(self, request: web.Request) -> web.StreamResponse:
        """Lines of JSON: path first, then ranges as they become ready. The file stays pinned while the connection lives."""
        s = self._ready()
        entry = await asyncio.to_thread(s.lease, request.query.get("object", ""))
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closing
                loop.call_soon_threadsafe(changed.set)

        entry.listeners.add(listener)
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            await answer.prepare(request)
            await _announce(answer, entry, changed)
            while request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110
                await asyncio.sleep(_LEASE_LOOK_S)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            entry.listeners.discard(listener)
            if s.cache is not None:
                s.cache.release(entry)
        return answer

    async def peer_claim(self, request: web.Request) -> web.Response:
        s, q = self._ready(), request.query
        answer = await asyncio.get_running_loop().run_in_executor(
            self._claims, s.claim, q.get("by", ""), q.get("object", ""), _number(q.get("range", ""))
        )
        return web.json_response(answer)

    async def peer_range(self, request: web.Request) -> web.Response:
        s, q = self._ready(), request.query
        wait = min(float(_number(q.get("wait", "0"))), s.config.peer_deadline_s)
        offer = await asyncio.get_running_loop().run_in_executor(
            self._peers, s.offer, q.get("object", ""), _number(q.get("range", "")), wait
        )
        return web.json_response(offer)

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(self.service.status())


async def _announce(answer: web.StreamResponse, entry: Entry, changed: asyncio.Event) -> None:
    """Tell the loader the path once the file has its pages, then each newly ready range; something at least every second."""
    while not entry.reserved:
        changed.clear()
        if entry.error is not None:
            return await _say(answer, {"error": entry.error.as_json()})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), _PULSE_S)
        if not entry.reserved and entry.error is None:
            await _say(answer, {})
    told = bytes(entry.ready)
    await _say(
        answer,
        {
            "path": str(entry.path),
            "then": str(entry.final),
            "size": entry.file.size,
            "ready": _indices(bytes(len(told)), told),
        },
    )
    while True:
        changed.clear()
        now = bytes(entry.ready)
        if now != told:
            await _say(answer, {"ready": _indices(told, now)})
            told = now
        if entry.error is not None:
            return await _say(answer, {"error": entry.error.as_json()})
        if all(told):
            return await _say(answer, {"done": True})
        try:
            await asyncio.wait_for(changed.wait(), _PULSE_S)
        except TimeoutError:
            await _say(answer, {})


def _number(text: str) -> int:
    try:
        return int(float(text))
    except ValueError:
        raise DynamoBlobError("WEIGHTS-UNKNOWN-OBJECT", "not a number", why=text[:20]) from None


def _indices(before: bytes, now: bytes) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(before, now, strict=True)) if b and not a]


async def _say(answer: web.StreamResponse, message: dict[str, Any]) -> None:
    await answer.write(json.dumps(message).encode() + b"\n")


async def serve(service: WeightService, stop: asyncio.Event) -> None:
    """Listen at once, resolve beside it, run until `stop`. Raises the error with which the release was refused."""
    runner = web.AppRunner(application(service), access_log=None, handle_signals=False, shutdown_timeout=2.0)
    await runner.setup()
    site = await _listen(runner, service.config.listen)
    handover = Handover(service)
    await handover.start()
    resolving = asyncio.create_task(asyncio.to_thread(service.resolve))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({resolving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if resolving.done() and resolving.exception() is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LINGER_S)
            resolving.result()
        await stopping
    finally:
        await handover.close()
        service.close()
        stopping.cancel()
        await site.stop()
        await runner.cleanup()
        _remove_socket(service.config.listen)


async def _listen(runner: web.AppRunner, address: str) -> Any:
    if address.startswith("unix:"):
        path = Path(address[5:])
        path.parent.mkdir(parents=True, exist_ok=True)
        await _refuse_living(path)
        _remove_socket(address)
        site: Any = web.UnixSite(runner, str(path))
        await site.start()
        os.chmod(path, 0o660)
        return site
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    site = web.TCPSite(runner, host, int(port))
    await site.start()
    return site


def _remove_socket(address: str) -> None:
    if address.startswith("unix:"):
        Path(address[5:]).unlink(missing_ok=True)


async def _refuse_living(path: Path) -> None:
    """A socket left by a dead service is replaced; one that answers is another service's."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_unix_connection(str(path)), 1.0)
    except (OSError, TimeoutError):
        return
    writer.close()
    raise DynamoBlobError(
        "WEIGHTS-SOCKET-TAKEN",
        "another weight service listens there",
        where=str(path),
        do="stop it, or give this one another socket",
    )
