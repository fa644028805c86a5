"""What one caller can do to the others: hostile bodies, headers, connections; a frontend that is frozen; broken tenants files."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from components.frontend import edge
from components.frontend.app import applications
from components.frontend.tenants import Tenants
from tests.unit.gateway.stub import Seen, Stage, answer
from tests.unit.gateway.test_tenants import KEYS, bearer, keyed, tenants_file

SAY = [{"role": "user", "content": "a"}]


async def raw(url: Any, data: bytes, wait_s: float = 5.0) -> bytes:
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), wait_s)
    finally:
        writer.close()


HEAVY: dict[str, dict[str, Any]] = {
    "calls": {"messages": [{"role": "assistant", "content": None, "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":' + "[" * 500 + "]" * 500 + "}"}}] * 6000}]},
    "members": {"messages": SAY, "metadata": {str(i): 0 for i in range(600_000)}},
    "metadata": {"messages": SAY, "metadata": {str(i): [] for i in range(500_000)}},
    "messages": {"messages": SAY * 200_000},
    "tools": {"messages": SAY, "tools": [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}] * 60_000},
}  # fmt: skip


@pytest.mark.parametrize("kind", HEAVY)
async def test_one_large_request_does_not_stop_the_others(tmp_path: Path, kind: str) -> None:
    body = json.dumps({"model": "m", "max_tokens": 1, **HEAVY[kind]}).encode()
    assert len(body) <= 8 << 20
    async with Stage(tmp_path, router=True) as s:
        worst, over = 0.0, asyncio.Event()

        async def lag() -> None:
            nonlocal worst
            while not over.is_set():
                began = time.monotonic()
                await asyncio.sleep(0.01)
                worst = max(worst, time.monotonic() - began - 0.01)

        watch = asyncio.create_task(lag())
        async with s.client.post("/v1/chat/completions", data=body, headers={"content-type": "application/json"}) as r:
            assert r.status in (200, 400)
        over.set()
        await watch
        assert worst < 3.0, "it was 6 to 18 s"


async def test_bytes_that_are_no_text_are_a_wrong_key(tmp_path: Path) -> None:
    async with Stage(tmp_path, **keyed(tmp_path)) as s:
        for line in (b"authorization: Bearer \xff\xfe", b"x-api-key: K\xff"):
            got = await raw(
                s.client.server.make_url(""),
                b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + line + b"\r\n\r\n",
            )
            assert got.startswith(b"HTTP/1.1 401") and b"invalid_api_key" in got


async def test_arguments_nested_without_end_cost_the_hint_only(tmp_path: Path) -> None:
    call = {
        "id": "x",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a":' + "[" * 5000 + "]" * 5000 + "}"},
    }
    async with Stage(tmp_path, router=True) as s:
        code, _, _ = await s.chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert code == 200 and not any(m["op"] == "decide" for m in s.router.messages)


async def test_a_page_that_resolves_to_loopback_is_not_served_without_keys(tmp_path: Path) -> None:
    async with Stage(tmp_path) as s:
        code, body, _ = await s.chat(headers={"host": "evil.example"})
        assert (code, body["error"]["code"]) == (403, "host_not_allowed")
        for name in ("localhost:8000", "127.0.0.1", "[::1]:8000", "a.localhost"):
            assert (await s.chat(headers={"host": name}))[0] == 200
    async with Stage(tmp_path, **keyed(tmp_path)) as s:
        assert (await s.chat(headers=bearer("acme") | {"host": "api.example"}))[0] == 200, "with keys any name may be"


async def test_a_frozen_frontend_fails_what_waits_and_refuses_the_rest_at_once(tmp_path: Path) -> None:
    thaw = asyncio.Event()

    async def hang(request: web.Request, seen: Seen) -> web.StreamResponse:
        await thaw.wait()
        return await answer(request, seen)

    async with Stage(tmp_path, frozen_after_s=0.4, health_every_s=0.05) as s:
        s.frontend.live = thaw
        s.frontend.scripts = [hang] * 3
        began = time.monotonic()
        code, body, _ = await s.chat()
        assert (code, body["error"]["code"]) == (503, "unavailable") and time.monotonic() - began < 10
        began = time.monotonic()
        code, _, headers = await s.chat()
        assert code == 503 and "retry-after" in headers and time.monotonic() - began < 1
        thaw.set()
        s.frontend.scripts = []
        for _ in range(100):
            if (await s.chat())[0] == 200:
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail("it never came back")


async def test_a_frontend_that_is_only_slow_is_waited_for(tmp_path: Path) -> None:
    async def slow(request: web.Request, seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(4.0)
        return await answer(request, seen)

    async with Stage(tmp_path, frozen_after_s=0.4) as s:
        s.frontend.scripts = [slow]
        assert (await s.chat())[0] == 200


# -- the connection itself


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[Any]:
    """A gateway behind its own server, as in production: the address."""
    async with Stage(tmp_path) as stage:
        runner = web.AppRunner(applications(stage.gateway)[0], access_log=None, handler_cancellation=True)
        await runner.setup()
        server = await edge.listen(runner, "127.0.0.1", 0)
        try:
            yield At(server.sockets[0].getsockname())
        finally:
            server.close()
            await runner.cleanup()


class At:
    def __init__(self, address: Any) -> None:
        self.host, self.port = address[:2]


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\nzz\r\n",
        b"GET /live HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET /live HTTP/1.1\r\nx: " + b"a" * 20_000 + b"\r\n\r\n",
        b"NONSENSE\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_answered_like_everything_else(
    tmp_path: Path, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path) as address:
        got = await raw(address, request_)
    head, _, body = got.partition(b"\r\n\r\n")
    assert b" 400 " in head.partition(b"\r\n")[0] and b"x-request-id" in head.lower()
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert not [r for r in caplog.records if r.exc_info], "no traceback for a client's bytes"


async def test_an_encoded_body_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as address:
        for coding in ("gzip", "deflate"):
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-encoding: {coding}\r\ncontent-length: 2\r\n\r\n{{}}"
            got = await raw(address, head.encode())
            assert got.startswith(b"HTTP/1.1 415") and b"unsupported_media_type" in got


async def test_a_client_that_never_sends_a_request_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "HEAD_S", 0.3)
    async with served(tmp_path) as address:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET /live HTTP/1.1\r\nx: y")
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


# -- the tenants file


def late(path: str) -> tuple[Tenants, list[float]]:
    now = [100.0]
    return Tenants(path, clock=lambda: now[0]), now


@pytest.mark.parametrize(
    "broken",
    ["# \udcff", "x: 2026-13-45", "tenants: {}", "a: " + "[" * 3000, "tenants: {acme: {}}\ntenants: {}", "\0"],
)
def test_a_file_that_became_invalid_leaves_the_last_good_one_in_force(tmp_path: Path, broken: str) -> None:
    path = tenants_file(tmp_path)
    tenants, now = late(path)
    good = Path(path).read_bytes()
    more = broken.encode("utf-8", "surrogateescape")
    Path(path).write_bytes(more if broken.startswith(("tenants", "a:")) else good + b"\n" + more)
    now[0] += 2
    began = time.monotonic()
    assert tenants.caller(bearer("acme")).name == "acme" and time.monotonic() - began < 2
    assert (tenants.reloads, tenants.reload_errors) == (0, 1)
    now[0] += 2
    assert tenants.caller(bearer("acme")).name == "acme" and tenants.reload_errors == 1, "said once per change"
    Path(path).write_bytes(good)
    now[0] += 2
    tenants.caller(bearer("acme"))
    assert tenants.reloads == 1


def test_a_salt_key_path_that_no_system_has_stops_its_tenant_only(tmp_path: Path) -> None:
    path = tenants_file(tmp_path)
    raw_ = yaml.safe_load(Path(path).read_text())
    raw_["tenants"]["acme"]["salt_key_file"] = "a\0b"
    Path(path).write_text(yaml.safe_dump(raw_))
    tenants, _ = late(path)
    assert tenants.salt(tenants.caller(bearer("clinic")), "")
    with pytest.raises(Exception, match="salt key is not usable"):
        tenants.salt(tenants.caller(bearer("acme")), "")


def test_a_salt_key_that_others_can_read_is_noticed_while_serving(tmp_path: Path) -> None:
    path = tenants_file(tmp_path)
    tenants, now = late(path)
    assert tenants.salt(tenants.caller(bearer("acme")), "")
    (tmp_path / "acme.salt").chmod(0o644)
    now[0] += 2
    with pytest.raises(Exception, match="salt key is not usable"):
        tenants.salt(tenants.caller(bearer("acme")), "")
    assert KEYS


def revoke(path: Path, tenant: str) -> None:
    raw_ = yaml.safe_load(path.read_text())
    del raw_["tenants"][tenant]
    path.write_text(yaml.safe_dump(raw_))


async def test_a_revoked_key_has_no_more_request_however_long_nobody_called(tmp_path: Path) -> None:
    config = keyed(tmp_path)
    async with Stage(tmp_path, **config) as s:
        revoke(Path(config["tenants_file"]), "acme")
        for _ in range(100):  # nobody calls meanwhile
            await asyncio.sleep(0.1)
            if s.gateway.tenants.reloads:
                break
        assert (await s.chat(headers=bearer("acme")))[0] == 401
        assert (await s.chat(headers=bearer("clinic")))[0] == 200


async def test_health_is_false_when_no_tenant_can_be_served(tmp_path: Path) -> None:
    config = keyed(tmp_path)
    for name in KEYS:
        (tmp_path / f"{name}.salt").chmod(0o644)
    async with Stage(tmp_path, **config) as s:
        async with s.client.get("/health") as r:
            assert r.status == 503 and "no tenant can be served" in (await r.json())["why"]
        (tmp_path / "acme.salt").chmod(0o600)
        for _ in range(100):
            await asyncio.sleep(0.1)
            async with s.client.get("/health") as r:
                if r.status == 200:
                    break
        else:
            pytest.fail("it stays false")


async def test_what_workers_append_to_a_salt_cannot_come_from_a_client(tmp_path: Path) -> None:
    async with Stage(tmp_path) as s:
        await s.chat(cache_salt="0" * 32 + "-standard-" + "a" * 32 + "~q0123456789abcdef")
        await s.chat(cache_salt="~q0123456789abcdef")
        await s.chat(cache_salt="mine")
        salts = [seen.body["cache_salt"] for seen in s.frontend.seen]
    assert not any("~" in salt for salt in salts) and len(set(salts)) == 3 and salts[2] == "mine"
