"""The way to Dynamo's frontend: one retry without the pin before the first byte, torn streams, leaving clients."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from tests.unit.gateway.stub import DONE, Seen, Stage, answer, chunk, error

PIN = "x-dynamo-prefill-instance-id"


async def test_the_pin_is_the_routers_and_the_served_worker_is_dynamos(tmp_path: Path) -> None:
    async with Stage(tmp_path, router=True) as s:
        status, body, headers = await s.chat()
        assert (status, body["choices"][0]["message"]["content"]) == (200, "a b")
        seen = s.frontend.seen[0]
        assert seen.headers[PIN] == "7"
        assert seen.headers["x-dynamo-request-id"] == headers["x-request-id"]
        asked = s.router.messages[0]
        assert asked["op"] == "decide" and asked["ids"] and asked["rid"] == headers["x-request-id"]
        async with s.client.get(f"/debug/decisions/{headers['x-request-id']}") as r:
            record = await r.json()
        assert (record["named"], record["served_prefill"], record["served_decode"], record["cached_tokens"]) == (
            7,
            7,
            9,
            4,
        )
        done = await s.router.wait_for("done")
        assert (done["served"], done["cached_tokens"]) == (7, 4)


@pytest.mark.parametrize(
    ("status", "message"), [(500, "Failed to generate completions"), (503, "x"), (400, "Invalid request")]
)
async def test_a_pin_that_fails_is_tried_once_without(tmp_path: Path, status: int, message: str) -> None:
    async with Stage(tmp_path, router=True) as s:
        s.frontend.scripts = [error(status, message)]
        code, body, _ = await s.chat()
        assert code == 200 and body["choices"]
        assert [PIN in seen.headers for seen in s.frontend.seen] == [True, False]
        assert s.frontend.seen[0].headers["x-dynamo-request-id"] != s.frontend.seen[1].headers["x-dynamo-request-id"]


async def test_the_second_failure_is_the_answer(tmp_path: Path) -> None:
    async with Stage(tmp_path, router=True) as s:
        s.frontend.scripts = [error(503), error(503)]
        code, body, headers = await s.chat()
        assert (code, body["error"]["code"], len(s.frontend.seen)) == (503, "unavailable", 2)
        assert int(headers["retry-after"]) >= 1


async def test_without_a_pin_a_failure_is_tried_once_more_while_workers_serve(tmp_path: Path) -> None:
    """Dynamo repeats nothing when it cannot connect to a worker in a burst: 6 of 200 streams at once were lost so."""
    async with Stage(tmp_path) as s:
        s.frontend.scripts = [error(500)]
        code, body, _ = await s.chat()
        assert code == 200 and body["choices"] and len(s.frontend.seen) == 2
        s.frontend.scripts, s.frontend.seen = [error(400, "no")], []
        assert (await s.chat())[0] == 400 and len(s.frontend.seen) == 1, "a client's mistake stays one"


async def test_an_outage_is_not_asked_twice_for_everything(tmp_path: Path) -> None:
    async with Stage(tmp_path) as s:
        s.frontend.scripts = [error(500)] * 400
        assert {(await s.chat())[0] for _ in range(60)} == {503}
        tries = len(s.frontend.seen) - 60
        assert 32 <= tries <= 32 + 6, "a burst of 32, and one in ten"


async def test_a_prefill_worker_that_dies_under_many_is_seen_by_none(tmp_path: Path) -> None:
    """The budget is for tries that change nothing: 60 pinned to a dead worker are all served without the pin."""

    async def dead(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await (error(500) if PIN in seen.headers else answer)(request, seen)

    async with Stage(tmp_path, router=True) as s:
        s.frontend.scripts = [dead] * 120
        assert {code for code, _, _ in await asyncio.gather(*(s.chat() for _ in range(60)))} == {200}
        assert len(s.frontend.seen) == 120


async def test_without_a_worker_nothing_is_tried_again(tmp_path: Path) -> None:
    async with Stage(tmp_path) as s:
        assert (await s.chat())[0] == 200
        s.frontend.listed, s.frontend.scripts = [], [error(500)] * 2
        assert (await s.chat())[0] == 503 and len(s.frontend.seen) == 2


async def test_a_stream_that_begins_with_an_error_is_retried(tmp_path: Path) -> None:
    async def broken(request: web.Request, _: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'event: error\ndata: {"message":"prefill died"}\n\n' + DONE)
        return response

    async with Stage(tmp_path, router=True) as s:
        s.frontend.scripts = [broken]
        code, text, _ = await s.chat(stream=True)
        assert code == 200 and "prefill died" not in text and text.count("data: ") == 3


async def _torn(request: web.Request, _: Seen) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(chunk("a") + b'data: {"cho')
    request.transport.abort()  # type: ignore[union-attr]
    return response


async def _silent_end(request: web.Request, _: Seen) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(chunk("a"))
    return response


@pytest.mark.parametrize("script", [_torn, _silent_end])
async def test_a_torn_stream_ends_in_an_error_event(tmp_path: Path, script: object) -> None:
    """After the first byte nothing is retried: the client is told, in a form every client parses."""
    async with Stage(tmp_path, router=True) as s:
        s.frontend.scripts = [script]  # type: ignore[list-item]
        code, text, headers = await s.chat(stream=True)
        events = [e for e in text.split("\n\n") if e.startswith("data: ")]
        whole = [json.loads(e[6:]) for e in events if e != "data: [DONE]" and e != 'data: {"cho']
        assert code == 200 and whole[0]["choices"][0]["delta"]["content"] == "a"
        assert whole[-1]["error"]["code"] in ("stream_broken", "stream_incomplete")
        assert events[-1] == "data: [DONE]" and len(s.frontend.seen) == 1
        async with s.client.get(f"/debug/decisions/{headers['x-request-id']}") as r:
            assert (await r.json())["outcome"] == "torn"


async def test_a_torn_plain_answer_is_tried_again_since_the_client_saw_nothing(tmp_path: Path) -> None:
    async def torn(request: web.Request, _: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        request.transport.abort()  # type: ignore[union-attr]
        return response

    async with Stage(tmp_path, router=True) as s:
        s.frontend.scripts = [torn]
        code, body, _ = await s.chat()
        assert code == 200 and body["choices"] and len(s.frontend.seen) == 2


async def test_a_client_that_leaves_closes_the_upstream_connection(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def endless(request: web.Request, _: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(chunk("a"))
            started.set()
            await asyncio.sleep(0.005)

    async def before_first_byte(request: web.Request, _: Seen) -> web.StreamResponse:
        started.set()
        await asyncio.sleep(60)
        raise AssertionError("not cancelled")

    for script in (endless, before_first_byte):
        async with Stage(tmp_path) as s:
            started.clear()
            s.frontend.scripts = [script]
            task = asyncio.create_task(s.chat(stream=True))
            await asyncio.wait_for(started.wait(), 5)
            task.cancel()
            await asyncio.wait_for(s.frontend.gone.wait(), 5)
            await asyncio.wait_for(s.gateway.idle.wait(), 5)
            assert s.gateway.inflight == 0


async def test_a_client_that_stops_reading_is_dropped(tmp_path: Path) -> None:
    async def flood(request: web.Request, _: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(chunk("x" * 60000))

    async with Stage(tmp_path, stall_deadline_s=0.3) as s:
        s.frontend.scripts = [flood]
        reader, writer = await asyncio.open_connection("127.0.0.1", s.client.port, limit=1024)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        await reader.readline()
        await asyncio.wait_for(s.frontend.gone.wait(), 20)
        await asyncio.wait_for(s.gateway.idle.wait(), 5)
        writer.close()


async def test_no_frontend_is_503_with_retry_after(tmp_path: Path) -> None:
    async with Stage(tmp_path, upstream="http://127.0.0.1:9") as s:
        code, body, headers = await s.chat()
        assert (code, body["error"]["code"], headers["retry-after"]) == (503, "unavailable", "2")


async def test_a_second_frontend_makes_the_death_of_the_first_invisible(tmp_path: Path) -> None:
    async with Stage(tmp_path, more_upstreams=("http://127.0.0.1:9",)) as s:
        assert [(await s.chat())[0] for _ in range(6)] == [200] * 6
        assert len(s.frontend.seen) == 6


async def test_a_frontend_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async def silent(_: web.Request, __: Seen) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    async with Stage(tmp_path, idle_deadline_s=0.2) as s:
        s.frontend.scripts = [silent, silent]
        code, body, _ = await asyncio.wait_for(s.chat(), 5)
        assert code == 503 and "in time" in body["error"]["message"]


async def test_router_late_away_or_unwilling_means_no_pin_and_no_delay(tmp_path: Path) -> None:
    async with Stage(tmp_path, router=True, router_deadline_ms=30) as s:
        s.router.delay_s = None
        assert (await s.chat())[0] == 200
        s.router.delay_s, s.router.decision = 0.0, {"prefill": None, "error": "no prefill worker is there"}
        assert (await s.chat())[0] == 200
        s.router.server.close()  # type: ignore[union-attr]
        s.gateway.asker._transport.abort()  # type: ignore[union-attr]
        assert (await s.chat())[0] == 200
        assert all(PIN not in seen.headers for seen in s.frontend.seen)
        assert [r.pin for r in s.gateway.decisions._records.values()] == ["late", "none", "no-router"]


async def test_a_router_that_comes_back_is_used_again(tmp_path: Path) -> None:
    async with Stage(tmp_path, router=True) as s:
        s.router.server.close()  # type: ignore[union-attr]
        s.gateway.asker._transport.abort()  # type: ignore[union-attr]
        await s.chat()
        s.router.path.unlink(missing_ok=True)
        await s.router.start()
        await asyncio.wait_for(s.gateway.asker.up.wait(), 5)  # type: ignore[union-attr]
        await s.chat()
        assert [PIN in seen.headers for seen in s.frontend.seen] == [False, True]


async def test_the_load_plan_travels_as_a_header(tmp_path: Path) -> None:
    async with Stage(tmp_path, router=True) as s:
        s.router.decision |= {"max_load_tokens": 256, "kv_load_tiers": []}
        await s.chat()
        assert json.loads(s.frontend.seen[0].headers["x-dynamo-meta-load-plan"]) == {
            "max_load_tokens": 256,
            "kv_load_tiers": [],
        }


async def test_a_client_that_leaves_while_the_router_decides_leaves_no_booking(tmp_path: Path) -> None:
    async with Stage(tmp_path, router=True) as s:
        s.router.delay_s = None
        task = asyncio.create_task(s.chat())
        asked = await s.router.wait_for("decide")
        task.cancel()
        assert (await s.router.wait_for("done"))["rid"] == asked["rid"]
        assert not s.frontend.seen
