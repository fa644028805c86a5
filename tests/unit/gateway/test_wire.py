"""The gateway's own HTTP client: any cut of the bytes gives the same answer, nothing odd is taken for a whole one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from components.frontend.config import GatewayConfig
from components.frontend.upstream import UpstreamGone, Upstreams
from components.frontend.wire import HELD_LIMIT, Answer, Broken

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class FakeConnection:
    """Holds one answer; remembers what became of it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.answer: Answer | None = None
        self.reusable: bool | None = None
        self.paused = False

    def free(self, usable: bool) -> None:
        self.answer, self.reusable = None, usable

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


def fed(pieces: list[bytes]) -> tuple[FakeConnection, Answer]:
    connection = FakeConnection()
    connection.answer = answer = Answer(connection, 5.0)  # type: ignore[arg-type]
    for piece in pieces:
        answer.feed(piece)
    return connection, answer


@pytest.mark.parametrize(
    ("raw", "body", "reusable"),
    [
        (CHUNKED + b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\n\r\n", b"hello world", True),
        (CHUNKED + b"A\r\n0123456789\r\n0\r\ntrailer: x\r\n\r\n", b"0123456789", True),
        (OK + b"content-length: 11\r\n\r\nhello world", b"hello world", True),
        (OK + b"content-length: 0\r\n\r\n", b"", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 2\r\n\r\nhi", b"hi", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (OK + b"connection: close\r\ncontent-length: 2\r\n\r\nhi", b"hi", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", b"hi", False),
        (OK + b"content-length: 2\r\n\r\nhi and more", b"hi", False),
        (CHUNKED + b"2\r\nhi\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n", b"hi", False),
    ],
)
async def test_any_cut_of_the_bytes_gives_the_same_answer(raw: bytes, body: bytes, reusable: bool) -> None:
    rng = random.Random(5)
    cuts = [[raw], [raw[i : i + 1] for i in range(len(raw))]]
    for _ in range(40):
        at = sorted(rng.sample(range(1, len(raw)), rng.randrange(1, 6)))
        cuts.append([raw[a:b] for a, b in zip([0, *at], [*at, len(raw)], strict=True)])
    for pieces in cuts:
        connection, answer = fed(pieces)
        assert answer.done and await answer.read() == body and answer.status in (200, 204), pieces
        answer.release()
        assert connection.reusable is reusable, pieces


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-x\r\n\r\n", b"HTTP/2 200\r\n\r\n", OK + b"no colon\r\n\r\n", OK + b"content-length: -1\r\n\r\nx", OK + b"content-length: 1_0\r\n\r\nx",
        OK + b"transfer-encoding: gzip\r\n\r\nx", CHUNKED + b"zz\r\n", CHUNKED + b"-1\r\n", CHUNKED + b"1_0\r\n", CHUNKED + b"\r\n", CHUNKED + b"2\r\nhixx",
        CHUNKED + b"123456789\r\n", b"x" * 70000, CHUNKED + b"1" * 70000,
    ],
)  # fmt: skip
async def test_what_is_no_http_is_broken(raw: bytes) -> None:
    connection, answer = fed([raw])
    with pytest.raises(Broken):
        await answer.head()
        await answer.read()
    answer.release()
    assert connection.reusable is False


async def test_a_torn_answer_gives_what_came_and_then_says_so() -> None:
    connection, answer = fed([CHUNKED + b"5\r\nhello\r\n5\r\nwo"])
    answer.lost(None)
    assert await answer.readany() == b"hellowo"
    with pytest.raises(Broken):
        await answer.readany()
    answer.release()
    assert connection.reusable is False


async def test_an_answer_without_length_ends_with_its_connection() -> None:
    connection, answer = fed([OK + b"\r\n", b"all of it"])
    answer.lost(None)
    assert await answer.read() == b"all of it"
    answer.release()
    assert connection.reusable is False


async def test_what_nobody_takes_pauses_the_connection() -> None:
    connection, answer = fed([OK + b"content-length: 9999999\r\n\r\n", b"x" * (HELD_LIMIT + 1)])
    assert connection.paused and answer.held
    assert len(await answer.readany()) == HELD_LIMIT + 1
    assert not connection.paused and not answer.held


async def test_a_full_sink_pauses_until_it_is_resumed_and_the_end_is_left_to_the_caller() -> None:
    got: list[bytes] = []

    def sink(data: bytes) -> bool:
        got.append(data)
        return data != b"full"

    connection, answer = fed([CHUNKED + b"1\r\na\r\n"])
    answer.attach(sink)
    answer.feed(b"1\r\nb\r\n")
    answer.feed(b"4\r\nfull\r\n")
    assert connection.paused
    await answer.flowed()
    answer.resume()
    assert not connection.paused
    answer.feed(b"4\r\nlast\r\n0\r\n\r\n")
    await answer.flowed()
    assert (got, answer.done, answer.taken()) == ([b"a", b"b", b"full"], True, b"last")


async def test_silence_is_measured_from_the_last_byte_and_not_while_the_client_is_behind() -> None:
    connection = FakeConnection()
    connection.answer = answer = Answer(connection, 0.3)  # type: ignore[arg-type]
    answer.feed(CHUNKED + b"1\r\na\r\n")
    answer.attach(lambda _: False)
    await asyncio.sleep(0.7)  # held: not the frontend's silence
    assert answer.held
    answer.resume()
    started = answer._loop.time()
    with pytest.raises(TimeoutError):
        await answer.flowed()
    assert answer._loop.time() - started > 0.2


# -- with sockets, on the loop of tests and on the gateway's own

Handler = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


async def _served(handler: Handler, client: Callable[[Upstreams], Awaitable[None]]) -> None:
    count = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        try:
            await handler(count, reader, writer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config: dict[str, Any] = {"name": "g", "served_model": "m", "model_path": "x", "max_model_len": 9, "block_size": 1}
    upstreams = Upstreams(GatewayConfig(upstream=f"http://127.0.0.1:{port}", idle_deadline_s=5, **config))
    try:
        await asyncio.wait_for(client(upstreams), 20)
    finally:
        await upstreams.close()
        server.close()


RUN = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


async def _ask(upstreams: Upstreams) -> bytes:
    _, answer = await upstreams.post("/v1/x", b'{"a":1}', {"content-type": "application/json", "bad": "a\r\nb: c"})
    try:
        return await answer.read()
    finally:
        answer.release()


@RUN
def test_a_connection_is_reused_and_a_stale_one_replaced(run: Any) -> None:
    seen: list[tuple[int, bytes]] = []

    async def two_each(n: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            seen.append((n, await _request(reader)))
            writer.write(OK + b"content-length: 2\r\n\r\nhi")
        if n == 1:
            await _request(reader)  # taken, and cut without a word: as a frontend that dies just then

    async def client(upstreams: Upstreams) -> None:
        assert [await _ask(upstreams) for _ in range(4)] == [b"hi"] * 4
        await asyncio.sleep(0)
        assert len(upstreams.replicas[0].busy) == 0

    run(_served(two_each, client))
    assert [n for n, _ in seen] == [1, 1, 2, 2]
    assert seen[0][1].startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:") and seen[0][1].endswith(b'\r\n\r\n{"a":1}')
    assert b"bad" not in seen[0][1]


@RUN
def test_a_replica_that_only_hangs_up_is_gone_after_two_connections(run: Any) -> None:
    connections = []

    async def silent(n: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(n)
        await _request(reader)

    async def client(upstreams: Upstreams) -> None:
        with pytest.raises(UpstreamGone):
            await _ask(upstreams)
        assert not upstreams.replicas[0].busy and not upstreams.replicas[0].idle

    run(_served(silent, client))
    assert connections == [1, 2]


@RUN
def test_leaving_an_answer_cuts_its_connection(run: Any) -> None:
    async def main() -> None:
        cut = asyncio.Event()

        async def endless(n: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _request(reader)
            writer.write(CHUNKED + b"1\r\na\r\n")
            await reader.read()
            cut.set()

        async def client(upstreams: Upstreams) -> None:
            _, answer = await upstreams.post("/v1/x", b"{}", {})
            assert await answer.readany() == b"a"
            answer.release()
            await cut.wait()

        await _served(endless, client)

    run(main())
