"""What the gateway answers itself: OpenAI's error body, the right status, a request id on everything."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.unit.gateway.stub import Stage, error

JSON = {"content-type": "application/json"}


async def test_unknown_model_is_404_and_not_forwarded(tmp_path: Path) -> None:
    async with Stage(tmp_path) as s:
        code, body, headers = await s.chat(model="n")
        assert (code, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
        assert headers["x-request-id"] and not s.frontend.seen
        async with s.client.get("/v1/models/n") as r:
            assert r.status == 404


async def test_too_long_a_prompt_is_400_with_both_numbers(tmp_path: Path) -> None:
    async with Stage(tmp_path, max_model_len=64) as s:
        code, body, _ = await s.chat(messages=[{"role": "user", "content": "one two three " * 30}])
        found = s.gateway.renderer.chat({"messages": [{"role": "user", "content": "one two three " * 30}]})  # type: ignore[union-attr]
        tokens = len(s.gateway.renderer.encode(found, add_special_tokens=False))  # type: ignore[union-attr]
        assert (code, body["error"]["code"]) == (400, "context_length_exceeded")
        assert str(tokens) in body["error"]["message"] and "64" in body["error"]["message"]
        code, body, _ = await s.chat(messages=[{"role": "user", "content": "x" * 1_000_000}])
        assert code == 400 and "more than" in body["error"]["message"], "refused without tokenising a megabyte"
        async with s.client.post("/v1/completions", json={"model": "m", "prompt": list(range(3, 67))}) as r:
            assert r.status == 400
        async with s.client.post("/v1/completions", json={"model": "m", "prompt": list(range(3, 66))}) as r:
            assert r.status == 200, "one token fits"
        assert len(s.frontend.seen) == 1


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"), (b"{", "invalid_json"), (b"[]", "invalid_json"), (b'"x"', "invalid_json"), (b"\xff\xfe", "invalid_json"),
        (b'{"model":NaN}', "invalid_json"), (b"[" * 5000, "invalid_json"), (b'{"a":' * 3000 + b"1" + b"}" * 3000, "invalid_json"),
        (b"{}", "invalid_request"), (b'{"model":5}', "invalid_request"), (b'{"model":"m","nvext":5}', "invalid_request"),
        (b'{"model":"m","cache_salt":5}', "invalid_request"), (b'{"model":"m","nvext":{"annotations":5}}', "invalid_request"),
        (b'{"model":"m","nvext":{"agent_hints":5}}', "invalid_request"),
    ],
)  # fmt: skip
async def test_bad_bodies_are_400_never_500(tmp_path: Path, raw: bytes, code: str) -> None:
    async with Stage(tmp_path) as s, s.client.post("/v1/chat/completions", data=raw, headers=JSON) as r:
        body = await r.json()
        assert (r.status, body["error"]["code"], body["error"]["type"]) == (400, code, "invalid_request_error")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": 5}, {"messages": [5]}, {"messages": [{"role": 5}]}, {"messages": []}, {"messages": [{"role": "user", "content": {"a": 1}}]}, {"tools": 5},
        {"chat_template_args": 5}, {"max_tokens": "x"}, {"max_tokens": -1}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"tools": [5]}, {"stream": "yes"}, {"messages": [{"role": "user", "content": "\ud800"}]}, {"chat_template_args": {"self": 1, "messages": 2}},
    ],
)  # fmt: skip
async def test_what_the_gateway_cannot_render_is_left_to_dynamo_without_a_pin(
    tmp_path: Path, body: dict[str, object]
) -> None:
    """Its verdict on odd bodies is Dynamo's own; the gateway neither fails nor guesses."""
    async with Stage(tmp_path, router=True) as s:
        raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body)
        async with s.client.post("/v1/chat/completions", data=raw, headers=JSON) as r:
            assert r.status in (200, 400), await r.text()
        record = next(iter(s.gateway.decisions._records.values()))
        if set(body) & {"messages", "tools", "chat_template_args"}:
            assert record.pin in ("unsure", ""), record


async def test_a_form_post_is_refused(tmp_path: Path) -> None:
    """A web page may send forms and plain text to loopback without asking; JSON it may not."""
    async with Stage(tmp_path) as s:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            async with s.client.post("/v1/chat/completions", data=b"{}", headers={"content-type": kind}) as r:
                assert r.status == 415 and (await r.json())["error"]["code"] == "unsupported_media_type"


async def test_unknown_routes_and_methods_have_the_same_error_body(tmp_path: Path) -> None:
    async with Stage(tmp_path) as s:
        for method, path, status in (
            ("GET", "/nope", 404),
            ("GET", "/v1/chat/completions", 405),
            ("DELETE", "/v1/models", 405),
        ):
            async with s.client.request(method, path) as r:
                assert r.status == status and r.headers["x-request-id"]
                assert (await r.json())["error"]["message"]


@pytest.mark.parametrize(
    ("upstream", "ours", "code"),
    [(400, 400, "invalid_request"), (404, 503, "unavailable"), (429, 429, "overloaded"), (500, 503, "unavailable"), (503, 503, "unavailable"),
     (529, 503, "unavailable"), (422, 422, "invalid_request")],
)  # fmt: skip
async def test_dynamos_errors_get_openais_body(tmp_path: Path, upstream: int, ours: int, code: str) -> None:
    async with Stage(tmp_path) as s:
        s.frontend.scripts = [error(upstream, "why it was")] * 2
        status, body, headers = await s.chat()
        assert (status, body["error"]["code"]) == (ours, code)
        assert "why it was" in body["error"]["message"]
        assert ("retry-after" in headers) == (ours in (429, 503))


async def test_health_and_models_follow_what_a_request_would_do(tmp_path: Path) -> None:
    async with Stage(tmp_path, canary_after_s=1000) as s:

        async def state() -> tuple[int, int]:
            async with s.client.get("/health") as h, s.client.get("/v1/models") as m:
                return h.status, len((await m.json())["data"])

        assert await state() == (200, 1), "a canary of one token answered"
        assert [seen.body["max_tokens"] for seen in s.frontend.seen] == [1]
        assert await state() == (200, 1)
        assert len(s.frontend.seen) == 1, "no canary while the last answer is fresh"
        s.frontend.scripts = [error(500)] * 4
        await s.chat()
        assert await state() == (503, 0), "the next canary fails, too"
        assert await state() == (200, 1), "and the one after it does not"
        s.frontend.listed = []
        assert await state() == (503, 0)
        async with s.client.get("/v1/models/m") as r:
            assert r.status == 503 and "retry-after" in r.headers
        async with s.client.get("/live") as r:
            assert r.status == 200


async def test_a_slow_body_is_given_up(tmp_path: Path) -> None:
    async with Stage(tmp_path, body_deadline_s=0.1) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.client.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
        )
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()


async def test_draining_refuses_new_requests(tmp_path: Path) -> None:
    async with Stage(tmp_path) as s:
        s.gateway.draining = True
        code, body, headers = await s.chat()
        assert (code, body["error"]["code"]) == (503, "draining") and headers["retry-after"]
        async with s.client.get("/health") as r:
            assert r.status == 503


async def test_every_outcome_is_counted(tmp_path: Path) -> None:
    async with Stage(tmp_path) as s:
        await s.chat()
        await s.chat(model="n")
        async with s.client.get("/metrics") as r:
            text = await r.text()
        for line in (
            'requests_total{endpoint="chat/completions",outcome="ok",tenant=""} 1.0', 'requests_total{endpoint="chat/completions",outcome="refused",tenant=""} 1.0',
            'refused_total{code="model_not_found"} 1.0', 'pins_total{pin="no-router"} 1.0', "gateway_inflight 0.0",
        ):  # fmt: skip
            assert f"dynamo_blob_gateway_{line.removeprefix('gateway_')}" in text, line
