"""The gateway's request path: who calls, what may pass, which prefill worker, then the relay."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import json
import logging
import os
import random
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

from aiohttp import web

from components.common.errors import DynamoBlobError, nearest
from components.common.messages import loadplan
from components.common.messages.announce import Heard
from components.common.messages.router import Decision, Note
from components.frontend import sanitize
from components.frontend.asking import asker
from components.frontend.config import GatewayConfig
from components.frontend.decisions import Decisions, Record
from components.frontend.errors import Refusal
from components.frontend.health import Health, Verdict
from components.frontend.metrics import Metrics
from components.frontend.prompt import LONG_TEXT, Renderer
from components.frontend.pulse import Pulse
from components.frontend.relay import Outgoing, Relay
from components.frontend.reply import ClientStalled
from components.frontend.tenants import CHECK_S, Caller, Tenants
from components.frontend.upstream import Upstreams

log = logging.getLogger("gateway")


RECORD = web.RequestKey("record", Record)

SPECIALS = 8
"""Tokens a tokenizer may add around a prompt."""


class Gateway:
    """State of one gateway process. Raises GATEWAY-AUTH-NONE-PUBLIC, GATEWAY-NO-TENANTS."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        host = config.listen.rpartition(":")[0].strip("[]")
        if config.auth == "none" and not loopback(host):
            raise DynamoBlobError(
                "GATEWAY-AUTH-NONE-PUBLIC", "auth: none would let anybody in", where=config.listen, why="the address is not loopback",
                do="listen on 127.0.0.1, or set auth: keys and a tenants file",
            )  # fmt: skip
        if config.auth == "keys" and not config.tenants_file:
            raise DynamoBlobError(
                "GATEWAY-NO-TENANTS",
                "auth: keys needs a tenants file",
                where=config.name,
                do="set tenants_file; configs/tenants holds examples",
            )
        self.threads = ThreadPoolExecutor(4, "beside")
        self.tenants = Tenants(config.tenants_file if config.auth == "keys" else None, beside=self.threads.submit)
        self.renderer: Renderer | None = None
        self._reading: asyncio.Task[None] | None = None
        self._tenants_watch: asyncio.Task[None] | None = None
        self.upstreams = Upstreams(config)
        self.pulse = Pulse(self.upstreams, config.frozen_after_s)
        self.asker = asker(config.router, config.router_deadline_ms / 1e3)
        self.health = Health(config, self.upstreams)
        self.relay = Relay(config, self.upstreams, self._why_unhealthy)
        self.metrics, self.decisions = Metrics(), Decisions(config.decisions_kept)
        self.heard: Heard | None = None
        self.inflight = 0
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    async def open(self) -> None:
        if self.asker:
            await self.asker.open()
        self.heard = Heard(self.config.announce, self.config.name)
        self._reading = asyncio.create_task(self._read_model())
        self.pulse.start()
        self._tenants_watch = asyncio.create_task(self._watch_tenants())

    async def _watch_tenants(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S / 2)
            self.tenants.refresh()

    async def _read_model(self) -> None:
        """A worker writes the release's small files when it starts; until they are there the gateway is not healthy."""
        said = ""
        while self.renderer is None:
            try:
                self.renderer = await asyncio.get_running_loop().run_in_executor(
                    self.threads, Renderer, self.config.model_path
                )
            except DynamoBlobError as e:
                if e.why != said:
                    log.warning("%s", e)
                said = e.why
                await asyncio.sleep(0.5)
        gc.collect()
        gc.freeze()  # modules, templates, tokenizer: no collection walks them again while requests wait

    async def close(self) -> None:
        self.pulse.stop()
        if self._tenants_watch:
            self._tenants_watch.cancel()
        if self._reading:
            self._reading.cancel()
        if self.heard:
            self.heard.close()
        if self.asker:
            await self.asker.close()
        await self.upstreams.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    # -- requests

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._counted(request, "/v1/chat/completions")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._counted(request, "/v1/completions")

    async def _counted(self, request: web.Request, path: str) -> web.StreamResponse:
        record = Record(str(uuid.uuid4()))
        request[RECORD] = record
        started = time.perf_counter()
        self.inflight += 1
        self.idle.clear()
        try:
            response = await self._admitted(request, path, record)
            record.outcome = record.outcome or "ok"
            return response
        except Refusal as e:
            record.status, record.outcome = e.status, "refused" if e.status < 500 else "failed"
            self.metrics.refused.labels(e.code).inc()
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            record.outcome = "client-gone"
            raise
        except ClientStalled:
            record.outcome = "client-stalled"
            raise
        finally:
            self.inflight -= 1
            if not self.inflight:
                self.idle.set()
            record.seconds = time.perf_counter() - started
            self._finished(record, path)

    async def _admitted(self, request: web.Request, path: str, record: Record) -> web.StreamResponse:
        if self.draining:
            raise Refusal(503, "draining", "this gateway is going away", retry_after=1)
        caller = self.tenants.caller(request.headers)
        record.tenant = caller.name
        if self.inflight > self.config.max_concurrent:
            raise Refusal(
                429,
                "overloaded",
                f"{self.config.max_concurrent} requests are in flight, as many as this gateway takes",
                retry_after=1,
            )
        self.tenants.admit(caller)
        try:
            return await self._serve(request, path, record, caller)
        finally:
            self.tenants.leave(caller)

    async def _serve(self, request: web.Request, path: str, record: Record, caller: Caller) -> web.StreamResponse:
        raw = await self._read(request, self.tenants.body_limit(caller, self.config.max_body_bytes))
        body = await self._beside(len(raw) > sanitize.INLINE, sanitize.decode, raw)
        self._check_model(body)
        salt = self.tenants.salt(caller, sanitize.clean(body))
        if salt:
            body["cache_salt"] = salt
        started = time.perf_counter()
        try:
            decision = await self._decide(path, body, salt, record, len(raw) > sanitize.INLINE)
            self.metrics.decide.observe(time.perf_counter() - started)
            if self.config.trace_share >= 1 or (self.config.trace_share and random.random() < self.config.trace_share):
                sanitize.ask_worker_ids(body)
            headers = sanitize.passed_headers(request.headers) | {"content-type": "application/json"}
            if decision is not None:
                headers |= loadplan.header(decision)
            encoded = await self._beside(len(raw) > sanitize.INLINE, sanitize.encode, body)
            out = Outgoing(path, encoded, headers, record.named)
            return await self.relay.run(request, out, record, partial(self._first, record, started))
        finally:  # also for a client that left while the router was deciding
            self._note(record, "done")

    def _note(self, record: Record, op: Literal["first", "done"]) -> None:
        """Tell the router, if it was asked: what it booked for a request ends with the request."""
        if record.asked and self.asker:
            known = {"served": record.served_prefill, "cached_tokens": record.cached_tokens} if op == "done" else {}
            self.asker.note(Note(op=op, rid=record.request_id, **known))

    def _first(self, record: Record, started: float) -> None:
        record.ttft_ms = (time.perf_counter() - started) * 1e3
        self.metrics.first_byte.observe(record.ttft_ms / 1e3)
        self._note(record, "first")

    async def _read(self, request: web.Request, limit: int) -> bytes:
        if request.content_type != "application/json":
            raise Refusal(
                415, "unsupported_media_type", "send the body as application/json (-H 'content-type: application/json')"
            )
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refusal(415, "unsupported_media_type", "send the body as it is, without content-encoding")
        too_large = Refusal(413, "body_too_large", f"the body is larger than {limit} bytes, the limit here")
        if request.content_length is not None and request.content_length > limit:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.config.body_deadline_s):
                while chunk := await request.content.readany():
                    size += len(chunk)
                    if size > limit:
                        raise too_large
                    parts.append(chunk)
        except TimeoutError:
            raise Refusal(
                408, "body_timeout", f"the body did not arrive within {self.config.body_deadline_s:g} s"
            ) from None
        return b"".join(parts)

    def _check_model(self, body: dict[str, Any]) -> None:
        model = body.get("model")
        if not isinstance(model, str) or not model:
            raise Refusal(400, "invalid_request", "model must be a string", param="model")
        if model != self.config.served_model:
            raise Refusal(
                404,
                "model_not_found",
                f"the model '{model[:200]}' is not served here; {nearest(model[:200], [self.config.served_model])}",
                param="model",
            )

    # -- the decision

    async def _decide(self, path: str, body: dict[str, Any], salt: str, record: Record, large: bool) -> Decision | None:
        """Sets record.pin and record.named. Raises Refusal(400) for a prompt that cannot fit."""
        ids = await self._ids(path, body, large)
        if ids is None:
            record.pin = "unsure"
            return None
        if len(ids) >= self.config.max_model_len:
            raise _too_long(str(len(ids)), self.config.max_model_len)
        if self.asker is None:
            record.pin = "no-router"
            return None
        record.asked = True
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        decision = await self.asker.decide(record.request_id, ids, salt, most if type(most) is int and most > 0 else 0)
        if decision is None:
            record.pin = "late" if self.asker.connected else "no-router"
            return None
        record.named, record.overlap_blocks = decision.prefill, decision.overlap_blocks
        record.pin = "none" if decision.prefill is None else "pinned"
        return decision

    async def _beside(self, aside: bool, work: Callable[..., Any], *args: Any) -> Any:
        """`aside`: in a thread, so that one large request does not stop the others."""
        if not aside:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)

    async def _ids(self, path: str, body: dict[str, Any], large: bool) -> list[int] | None:
        renderer = self.renderer
        if renderer is None:
            return None
        chat = path.endswith("/chat/completions")
        prompt = await self._beside(large, renderer.chat if chat else renderer.completion, body)
        if prompt is None or isinstance(prompt, list):
            return prompt
        if self.asker is None and len(prompt.encode()) + SPECIALS < self.config.max_model_len:
            return []  # nobody asks for the ids, and a token is at least one byte: it fits
        at_least = len(prompt) // renderer.longest_token
        if at_least >= self.config.max_model_len:
            raise _too_long(f"more than {at_least}", self.config.max_model_len)
        encode = partial(renderer.encode, prompt, add_special_tokens=not chat)
        ids: list[int] = await self._beside(len(prompt) > LONG_TEXT, encode)
        return ids

    async def _why_unhealthy(self) -> str:
        self.health.saw(False)
        return "" if await self.health.listed() else f"no worker is there for '{self.config.served_model}'"

    def _finished(self, record: Record, path: str) -> None:
        m = self.metrics
        m.requests.labels(path.removeprefix("/v1/"), record.tenant, record.outcome).inc()
        m.seconds.observe(record.seconds)
        if record.pin:
            m.pins.labels(record.pin).inc()
        if record.retried:
            m.retries.inc()
        if record.named is not None and record.served_prefill not in (None, record.named):
            m.unserved_pins.inc()
        if record.outcome == "ok":
            self.health.saw(True)
        elif record.outcome in ("torn", "failed"):
            self.health.saw(False)
        self.decisions.add(record)

    # -- about the gateway

    async def models(self, request: web.Request) -> web.Response:
        self.tenants.caller(request.headers)
        return _json({"object": "list", "data": [self._card()] if (await self.health.look()).ok else []})

    async def model(self, request: web.Request) -> web.Response:
        self.tenants.caller(request.headers)
        name = request.match_info["model"]
        self._check_model({"model": name})
        if not (await self.health.look()).ok:
            raise Refusal(503, "unavailable", self.health.verdict.why, retry_after=2)
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        c = self.config
        return {
            "id": c.served_model,
            "object": "model",
            "created": 0,
            "owned_by": "dynamo-blob",
            "context_window": c.max_model_len,
            "engine": c.engine_kind,
        }

    async def healthz(self, _: web.Request) -> web.Response:
        verdict = await self.health.look()
        if self.renderer is None:
            verdict = Verdict(False, f"the model's files are not in {self.config.model_path} yet")
        if verdict.ok and self.tenants.path and not self.tenants.usable:
            verdict = Verdict(False, "no tenant can be served: none of their salt keys can be read (the log says why)")
        ok = verdict.ok and not self.draining
        why = "draining" if self.draining else verdict.why
        return _json({"status": "healthy" if ok else "unhealthy", "why": why, **self.status()}, 200 if ok else 503)

    async def live(self, _: web.Request) -> web.Response:
        return _json({"status": "live"})

    def status(self) -> dict[str, Any]:
        return {
            "name": self.config.name, "pid": os.getpid(), "model": self.config.served_model, "engine": self.config.engine_kind, "inflight": self.inflight,
            "router": "none" if self.asker is None else "connected" if self.asker.connected else "away",
            "announced": self.heard.status() if self.heard else {},
        }  # fmt: skip

    async def exposition(self, _: web.Request) -> web.Response:
        m = self.metrics
        m.inflight.set(self.inflight)
        m.reloads.set(self.tenants.reloads)
        m.reload_errors.set(self.tenants.reload_errors)
        m.healthy.set(float(self.health.verdict.ok))
        return web.Response(body=m.exposition(), headers={"content-type": "text/plain; version=0.0.4"})

    async def decision(self, request: web.Request) -> web.Response:
        """Loopback callers only; with `auth: keys` a tenant sees its own requests."""
        caller = self.tenants.caller(request.headers)
        if not loopback(request.remote or ""):
            raise Refusal(403, "loopback_only", "decisions are shown to callers on this host only")
        found = self.decisions.get(request.match_info["id"])
        if found is None or found["tenant"] != caller.name:
            raise Refusal(404, "not_found", "no recent request has this id")
        return _json(found)


def _too_long(tokens: str, limit: int) -> Refusal:
    return Refusal(
        400,
        "context_length_exceeded",
        f"the prompt has {tokens} tokens; this model takes {limit} tokens of prompt and answer together",
        param="messages",
    )


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")


def loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
