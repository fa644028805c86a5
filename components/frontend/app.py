"""Routes, errors, and the life of the gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import uuid
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from components.frontend import edge
from components.frontend.config import GatewayConfig
from components.frontend.errors import Refusal
from components.frontend.gateway import RECORD, Gateway, loopback
from components.frontend.openapi import description

log = logging.getLogger("gateway")


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer has a request id; every error has OpenAI's body. A bug of ours is a 500 that says so, once, in the log."""
    try:
        response = await handler(request)
        if not response.prepared:
            response.headers.setdefault("x-request-id", _id(request))
        return response
    except Refusal as e:
        response = e.response(_id(request))
        if request.can_read_body and not request.content.at_eof():
            response.force_close()  # the rest of a body nobody will read
        return response
    except web.HTTPException as e:
        refusal = Refusal(
            e.status,
            "method_not_allowed" if e.status == 405 else "not_found",
            f"{request.method} {request.path[:200]}: {e.reason}",
        )
        response = refusal.response(_id(request))
        if "allow" in e.headers:
            response.headers["allow"] = e.headers["allow"]
        return response
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("request %s", _id(request))
        return Refusal(500, "internal_error", f"the gateway failed; its log has request {_id(request)}").response(
            _id(request)
        )


@web.middleware
async def local_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    """`auth: none` trusts whoever is on this host; a web page that had its own name resolved to loopback is not."""
    if request.headers.get("host") and not loopback(_host(request.headers["host"])):
        raise Refusal(
            403, "host_not_allowed", "without keys only requests to localhost or a loopback address are served"
        )
    return await handler(request)


def _host(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _id(request: web.Request) -> str:
    record = request.get(RECORD)
    return record.request_id if record else str(uuid.uuid4())


def applications(gateway: Gateway) -> tuple[web.Application, web.Application | None]:
    """(the API, operations): operations are on the API's own port unless `ops_listen` gives them one."""
    middlewares = [errors, local_names] if gateway.config.auth == "none" else [errors]
    api = web.Application(middlewares=middlewares)
    api.router.add_post("/v1/chat/completions", gateway.chat)
    api.router.add_post("/v1/completions", gateway.completions)
    api.router.add_get("/v1/models", gateway.models)
    api.router.add_get("/v1/models/{model:.+}", gateway.model)
    api.router.add_get("/health", gateway.healthz)
    api.router.add_get("/live", gateway.live)
    text = description(gateway.config)

    async def openapi(_: web.Request) -> web.Response:
        return web.Response(body=text, content_type="application/json")

    api.router.add_get("/openapi.json", openapi)
    ops = web.Application(middlewares=middlewares) if gateway.config.ops_listen else None
    target = ops or api
    target.router.add_get("/metrics", gateway.exposition)
    target.router.add_get("/debug/decisions/{id}", gateway.decision)
    if ops is not None:
        ops.router.add_get("/health", gateway.healthz)
    return api, ops


async def serve(config: GatewayConfig) -> None:
    """Until SIGTERM or SIGINT; then answers in flight may finish for `drain_s`, new requests get 503."""
    gateway = Gateway(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)
    await gateway.open()
    runners: list[web.AppRunner] = []
    servers: list[asyncio.Server] = []
    try:
        for app, address in zip(applications(gateway), (config.listen, config.ops_listen), strict=True):
            if app is None:
                continue
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
            await runner.setup()
            runners.append(runner)
            host, _, port = address.rpartition(":")
            servers.append(await edge.listen(runner, host.strip("[]") or "127.0.0.1", int(port)))
        log.info("%s serves %s (%s) on %s", config.name, config.served_model, config.engine_kind, config.listen)
        await stop.wait()
        gateway.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gateway.idle.wait(), config.drain_s)
    finally:
        for server in servers:
            server.close()
        for runner in runners:
            await runner.cleanup()
        await gateway.close()
