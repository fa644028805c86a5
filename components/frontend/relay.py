"""One request through Dynamo's frontend: at most two tries, the second only while the client has seen no byte."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from aiohttp import web

from components.frontend.config import GatewayConfig
from components.frontend.decisions import TAIL, Record
from components.frontend.errors import Refusal, from_upstream, sse_error
from components.frontend.reply import Reply
from components.frontend.retries import RetryBudget
from components.frontend.upstream import UpstreamGone, Upstreams
from components.frontend.wire import Answer

log = logging.getLogger("gateway")

PIN = "x-dynamo-prefill-instance-id"
REQUEST_ID = "x-dynamo-request-id"
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
    """Nothing of this try reached the client. `pause`: the next one differs in nothing but its time, so it is taken
    from the budget; one without the pin or at another replica is not (a death must stay unseen however many it hit)."""

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
            if e.pause and not self.budget.take():  # a pin that fails is our own doing: always tried without
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
        except (OSError, TimeoutError) as e:
            raise _TryAgain(_broken(e)) from None
        try:
            if answer.status >= 400:
                await self._refused(answer, pin)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                return await self._stream(request, answer, base, record, on_first, pin)
            return await self._unary(request, answer, base, record, on_first)
        finally:
            answer.release()  # one that is not whole is cut: the frontend sees it and stops the workers

    async def _refused(self, answer: Answer, pin: int | None) -> None:
        body = b""
        with contextlib.suppress(OSError, TimeoutError):
            body = await answer.read(ERROR_BODY)
        why = await self.why_unhealthy() if answer.status >= 500 or answer.status == 404 else ""
        refusal = from_upstream(answer.status, body, why)
        # Dynamo answers 4xx, too, for a pinned worker it does not know (any more).
        if pin is not None and (answer.status >= 500 or b"Invalid request" in body):
            raise _TryAgain(refusal)
        if (
            answer.status >= 500 and answer.status != 529 and not why
        ):  # workers are there: Dynamo repeats nothing that failed to connect
            raise _TryAgain(refusal, pause=True)
        raise refusal

    async def _unary(
        self,
        request: web.Request,
        answer: Answer,
        base: str,
        record: Record,
        on_first: Callable[[], None],
    ) -> web.StreamResponse:
        try:
            body = await answer.read()
        except (OSError, TimeoutError) as e:
            raise _TryAgain(_broken(e), base) from None
        reply = _reply(request, answer, record)
        reply.whole(body)
        on_first()
        record.read_tail(body[-TAIL:])
        await reply.caught_up(self.config.stall_deadline_s)
        return reply

    async def _stream(
        self,
        request: web.Request,
        answer: Answer,
        base: str,
        record: Record,
        on_first: Callable[[], None],
        pin: int | None,
    ) -> web.StreamResponse:
        try:
            first = await answer.readany()
        except (OSError, TimeoutError) as e:
            raise _TryAgain(_broken(e), base) from None
        if not first:
            raise _TryAgain(Refusal(503, "unavailable", "the stream ended before its first byte", retry_after=1), base)
        if pin is not None and _ERROR_EVENT.match(first):
            raise _TryAgain(Refusal(503, "unavailable", "the prefill worker failed", retry_after=1))
        reply = _reply(request, answer, record)
        reply.begin(first)
        on_first()  # after the client has its first byte: telling the router must not delay it
        tail = first[-TAIL:]

        def on(chunk: bytes) -> bool:
            nonlocal tail
            tail = (tail + chunk)[-TAIL:]
            return reply.write(chunk)

        failed = ""
        answer.attach(on)
        while not answer.done:
            try:
                await answer.flowed()
            except (OSError, TimeoutError) as e:
                failed = _broken(e).message
                break
            if answer.held:
                await reply.caught_up(self.config.stall_deadline_s)
                answer.resume()
        last = answer.taken()
        tail = (tail + last)[-TAIL:]
        record.read_tail(tail)
        if failed:
            record.outcome = "torn"
            last += sse_error("stream_broken", failed, torn=not tail.endswith(b"\n\n"))
        elif not tail.rstrip().endswith(b"data: [DONE]"):
            record.outcome = "torn"
            last += sse_error("stream_incomplete", "the answer ended early", torn=not tail.endswith(b"\n\n"))
        elif b'data: {"error"' in tail or b"event: error" in tail:
            record.outcome = "failed"
        reply.end(last)
        await reply.caught_up(self.config.stall_deadline_s)
        return reply


def _reply(request: web.Request, answer: Answer, record: Record) -> Reply:
    record.status = answer.status
    return Reply(request, answer.status, answer.headers.get("content-type", "application/json"), record.request_id)


def _broken(error: BaseException) -> Refusal:
    kind = "did not answer in time" if isinstance(error, TimeoutError) else "broke the connection"
    return Refusal(503, "unavailable", f"Dynamo's frontend {kind}", retry_after=1)
