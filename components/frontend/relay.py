"""One request through Dynamo's frontend: at most two tries, the second only while the client has seen no byte."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import aiohttp
from aiohttp import web

from components.frontend.config import GatewayConfig
from components.frontend.decisions import TAIL, Record
from components.frontend.errors import Refusal, from_upstream, sse_error
from components.frontend.retries import RetryBudget
from components.frontend.upstream import UpstreamGone, Upstreams, quick_ack

log = logging.getLogger("gateway")

PIN = "x-dynamo-prefill-instance-id"
REQUEST_ID = "x-dynamo-request-id"
NEVER_WAITS = 16384
"""Bytes in a client's socket buffer below which a write never waits (asyncio pauses at 64 KiB)."""

PAUSE_S = (0.05, 0.25)
"""Before a second try that changes nothing but the moment: a burst that Dynamo could not connect for is over by then."""

ERROR_BODY = 65536
"""Bytes read of an error's body."""

_ERROR_EVENT = re.compile(rb'^(?:event: ?error|: ?[^\n]*\n+event: ?error|data: ?\{"(?:error|message)")')
"""How Dynamo begins a stream that has failed before its first token."""


class Outgoing(NamedTuple):
    path: str
    body: bytes
    headers: Mapping[str, str]
    pin: int | None


class _TryAgain(Exception):
    """Nothing of this try reached the client. `pause`: the next one differs in nothing but its time."""

    def __init__(self, refusal: Refusal, base: str = "", pause: bool = False) -> None:
        super().__init__(refusal.message)
        self.refusal, self.base, self.pause = refusal, base, pause


class Relay:
    """`on_first(record)` is called when the first byte of the answer is here (prefill is over)."""

    def __init__(
        self, config: GatewayConfig, upstreams: Upstreams, why_unhealthy: Callable[[], Awaitable[str]]
    ) -> None:
        self.config, self.upstreams, self.why_unhealthy = config, upstreams, why_unhealthy
        self.budget = RetryBudget()

    async def run(
        self, request: web.Request, out: Outgoing, record: Record, on_first: Callable[[], None]
    ) -> web.StreamResponse:
        """The response, sent to its end. Raises Refusal when nothing was sent. Cancellation closes the upstream connection."""
        self.budget.request()
        try:
            return await self._attempt(request, out, record, on_first, record.request_id, out.pin, "")
        except _TryAgain as e:
            if not self.budget.take():
                raise e.refusal from None
            record.retried, record.named = True, None
            if e.pause:
                await asyncio.sleep(random.uniform(*PAUSE_S))
            try:
                return await self._attempt(request, out, record, on_first, str(uuid.uuid4()), None, e.base)
            except _TryAgain as again:
                raise again.refusal from None

    async def _attempt(
        self,
        request: web.Request,
        out: Outgoing,
        record: Record,
        on_first: Callable[[], None],
        engine_id: str,
        pin: int | None,
        skip: str,
    ) -> web.StreamResponse:
        headers = {**out.headers, REQUEST_ID: engine_id, "x-request-id": record.request_id}
        if pin is not None:
            headers[PIN] = str(pin)
        try:
            base, answer = await self.upstreams.post(out.path, out.body, headers, skip)
        except UpstreamGone as e:
            log.warning("request %s: %s", record.request_id, e)  # the address is for operators, not for clients
            raise Refusal(503, "unavailable", "Dynamo's frontend does not answer", retry_after=2) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise _TryAgain(_broken(e)) from None
        whole = False
        try:
            quick_ack(answer)
            if answer.status >= 400:
                await self._refused(answer, pin)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                response = await self._stream(request, answer, base, record, on_first, pin)
            else:
                response = await self._unary(request, answer, base, record, on_first)
            whole = True
            return response
        finally:
            if whole:
                answer.release()
            else:
                answer.close()  # the frontend sees the connection go and stops the workers

    async def _refused(self, answer: aiohttp.ClientResponse, pin: int | None) -> None:
        body = b""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            body = await answer.content.read(ERROR_BODY)
        why = await self.why_unhealthy() if answer.status >= 500 or answer.status == 404 else ""
        refusal = from_upstream(answer.status, body, why)
        # Dynamo answers 4xx, too, for a pinned worker it does not know (any more).
        if pin is not None and (answer.status >= 500 or b"Invalid request" in body):
            raise _TryAgain(refusal)
        if answer.status >= 500 and answer.status != 529 and not why:  # workers are there: Dynamo repeats nothing that failed to connect
            raise _TryAgain(refusal, pause=True)
        raise refusal

    async def _unary(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        base: str,
        record: Record,
        on_first: Callable[[], None],
    ) -> web.StreamResponse:
        parts = []
        try:
            while chunk := await answer.content.readany():
                quick_ack(answer)
                parts.append(chunk)
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise _TryAgain(_broken(e), base) from None
        body = b"".join(parts)
        on_first()
        record.read_tail(body[-TAIL:])
        record.status = answer.status
        response = web.Response(status=answer.status, body=body, headers=_headers(answer, record))
        await self._prepare(request, response)
        await response.write_eof()
        return response

    async def _stream(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        base: str,
        record: Record,
        on_first: Callable[[], None],
        pin: int | None,
    ) -> web.StreamResponse:
        content = answer.content
        try:
            chunk = await content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise _TryAgain(_broken(e), base) from None
        if not chunk:
            raise _TryAgain(Refusal(503, "unavailable", "the stream ended before its first byte", retry_after=1), base)
        if pin is not None and _ERROR_EVENT.match(chunk):
            raise _TryAgain(Refusal(503, "unavailable", "the prefill worker failed", retry_after=1))
        response = web.StreamResponse(status=answer.status, headers=_headers(answer, record))
        record.status = answer.status
        await self._prepare(request, response)
        tail = b""
        failed: str | None = None
        while chunk:
            quick_ack(answer)
            await self._write(request, response, chunk)
            if not tail:
                on_first()  # after the client has its first byte: telling the router must not delay it
            tail = (tail + chunk)[-TAIL:]
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, OSError, TimeoutError) as e:
                failed, chunk = _broken(e).message, b""
        record.read_tail(tail)
        if failed is not None:
            record.outcome = "torn"
            await self._write(request, response, sse_error("stream_broken", failed, torn=not tail.endswith(b"\n\n")))
        elif not tail.rstrip().endswith(b"data: [DONE]"):
            record.outcome = "torn"
            await self._write(
                request,
                response,
                sse_error("stream_incomplete", "the answer ended early", torn=not tail.endswith(b"\n\n")),
            )
        elif b'data: {"error"' in tail or b"event: error" in tail:
            record.outcome = "failed"
        await response.write_eof()
        return response

    async def _prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        try:
            async with asyncio.timeout(self.config.stall_deadline_s):
                await response.prepare(request)
        except TimeoutError:
            raise ClientStalled from None

    async def _write(self, request: web.Request, response: web.StreamResponse, chunk: bytes) -> None:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client left")
        if transport.get_write_buffer_size() + len(chunk) < NEVER_WAITS:  # the usual case, without a timer
            await response.write(chunk)
            return
        try:
            async with asyncio.timeout(self.config.stall_deadline_s):
                await response.write(chunk)
        except TimeoutError:
            transport.abort()
            raise ClientStalled from None


class ClientStalled(ConnectionError):
    """The client reads no more."""


def _headers(answer: aiohttp.ClientResponse, record: Record) -> dict[str, str]:
    headers = {
        "content-type": answer.headers.get("content-type", "application/json"),
        "x-request-id": record.request_id,
    }
    if headers["content-type"].startswith("text/event-stream"):
        headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return headers


def _broken(error: BaseException) -> Refusal:
    kind = "did not answer in time" if isinstance(error, TimeoutError) else "broke the connection"
    return Refusal(503, "unavailable", f"Dynamo's frontend {kind}", retry_after=1)


def now_ms(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
