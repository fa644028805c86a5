"""The router's socket: answers by number, bad input, a dead predecessor's socket, floods."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from components.common.errors import DynamoBlobError
from components.frontend.asking import HttpAsker, LineAsker
from router.server import LineServer, http_app
from tests.unit.router.test_choice import FakePool, decider


async def test_questions_and_notes_over_one_connection(tmp_path: Path) -> None:
    d = decider(FakePool(2))
    path = str(tmp_path / "r.sock")
    server = LineServer(d)
    listening = await server.start(path)
    assert stat.S_IMODE((tmp_path / "r.sock").stat().st_mode) == 0o600
    asker = LineAsker(path, 2.0)
    await asker.open()
    await asyncio.wait_for(asker.up.wait(), 5)
    found = await asyncio.gather(*(asker.decide(f"r{i}", [i] * 100, "", 5) for i in range(50)))
    assert all(f is not None and f.prefill in (1, 2) for f in found)
    assert len(d.bookings) == 50
    listening.close()
    await server.close()
    await asker.close()


@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b"{}",
        b"[]",
        b'{"op":"decide"}',
        b'{"op":"decide","n":1,"rid":"r","ids":["a"]}',
        b'{"op":"note"}',
        b"\xff",
        b"null",
    ],
)
async def test_a_message_that_is_none_closes_that_connection_only(tmp_path: Path, line: bytes) -> None:
    server = LineServer(decider(FakePool(1)))
    listening = await server.start(str(tmp_path / "r.sock"))
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "r.sock"))
    writer.write(line + b"\n")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "r.sock"))
    writer.write(b'{"op":"decide","n":3,"rid":"r","ids":[1]}\n')
    assert json.loads(await asyncio.wait_for(reader.readline(), 5)) == {"n": 3, "prefill": 1}
    writer.close()
    listening.close()
    await server.close()


async def test_a_dead_predecessors_socket_is_replaced_and_a_live_ones_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "r.sock")
    first = LineServer(decider(FakePool(1)))
    listening = await first.start(path)
    with pytest.raises(DynamoBlobError) as e:
        await LineServer(decider(FakePool(1))).start(path)
    assert e.value.code == "ROUTER-SOCKET-BUSY"
    listening.close()
    await first.close()
    again = await LineServer(decider(FakePool(1))).start(path)
    again.close()


async def test_the_same_over_http(tmp_path: Path) -> None:
    d = decider(FakePool(1))
    async with TestClient(TestServer(http_app(d, lambda: {"ready": False}))) as client:
        asker = HttpAsker(str(client.make_url("")), 2.0)
        await asker.open()
        found = await asker.decide("r1", [1] * 40, "", 0)
        assert found is not None and found.prefill == 1 and len(d.bookings) == 1
        async with client.post("/v1/note", json={"op": "done", "rid": "r1"}) as r:
            assert r.status == 204
        assert len(d.bookings) == 0
        for path in ("/v1/decide", "/v1/note"):
            async with client.post(path, data=b"{}") as r:
                assert r.status == 400
        async with client.get("/health") as r:
            assert r.status == 503
        async with client.get("/metrics") as r:
            assert "dynamo_blob_router_decisions_total" in await r.text()
        await asker.close()


async def test_a_router_nobody_runs_is_not_asked_on_every_request() -> None:
    asker = HttpAsker("http://127.0.0.1:9", 0.5)
    await asker.open()
    assert await asker.decide("r", [1], "", 0) is None
    assert asker._pause_until > 0 and not asker.connected
    await asker.close()


async def test_done_right_behind_its_question_leaves_no_booking(tmp_path: Path) -> None:
    """Both lines arrive in one read: the note is handled before the question's task has begun."""
    d = decider(FakePool(1))
    server = LineServer(d)
    listening = await server.start(str(tmp_path / "r.sock"))
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "r.sock"))
    writer.write(b'{"op":"decide","n":1,"rid":"r","ids":[1,2,3]}\n{"op":"done","rid":"r"}\n')
    assert json.loads(await asyncio.wait_for(reader.readline(), 5))["prefill"] == 1
    assert len(d.bookings) == 0 and not d._deciding
    writer.close()
    listening.close()
    await server.close()
