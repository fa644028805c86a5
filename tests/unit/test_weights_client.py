"""A service that answers without an end costs no more than the deadline, and no more memory than the limit."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.common.loading.client import ServiceClient, ServiceGone

Serve = Callable[[Callable[[socket.socket], None]], str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    listener = socket.socket(socket.AF_UNIX)

    def start(answer: Callable[[socket.socket], None]) -> str:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def run() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    answer(connection)

        threading.Thread(target=run, daemon=True).start()
        return f"unix:{tmp_path}/s"

    yield start
    listener.close()


def drip(connection: socket.socket, head: bytes) -> None:
    connection.sendall(head)
    for _ in range(60):
        connection.sendall(b"x")
        time.sleep(0.05)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-"])
def test_the_deadline_is_for_the_whole_answer(serve: Serve, head: bytes) -> None:
    address = serve(lambda c: drip(c, head))
    began = time.monotonic()
    with pytest.raises(ServiceGone):
        ServiceClient(address).get("/", 0.3)
    assert time.monotonic() - began < 1.5


@pytest.mark.parametrize("length", [b"Content-Length: 5000000\r\n", b""])
def test_an_answer_is_read_up_to_a_limit(serve: Serve, length: bytes) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n" + bytes(5_000_000))

    with pytest.raises(ServiceGone, match="more than 1048576 bytes"):
        ServiceClient(serve(answer)).get("/", 5.0, limit=1 << 20)


def test_an_answer_cut_short_is_none(serve: Serve) -> None:
    address = serve(lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"))
    with pytest.raises(ServiceGone):
        ServiceClient(address).get("/", 5.0)


@pytest.mark.parametrize(
    "head", [b"Content-Length: 4\r\n\r\nbody", b"\r\nbody", b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"]
)
def test_an_answer_comes_whole(serve: Serve, head: bytes) -> None:
    assert ServiceClient(serve(lambda c: c.sendall(b"HTTP/1.1 200 OK\r\n" + head))).get("/", 5.0) == b"body"
