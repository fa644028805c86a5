"""Bytes into a new file of the node cache: the same whether pages are huge, small or not there yet."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from components.common.loading import pages
from components.weights import entry as module
from components.weights.entry import Writer

RANGE, COUNT = 1 << 20, 41
SIZE = RANGE * COUNT - 12345


def new(path: Path) -> Writer:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, SIZE)
    return Writer(fd, SIZE)


def never() -> bool:
    return False


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path("/dev/shm") / f"test-entry-{os.getpid()}-{random.randrange(1 << 30)}"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("pages_are", ["as the kernel gives", "small", "huge only at first"])
def test_what_threads_write_beside_the_reservation_is_in_the_file(
    shm: Path, monkeypatch: pytest.MonkeyPatch, pages_are: str
) -> None:
    if pages_are != "as the kernel gives":
        real, left = pages.collapse, [1 if pages_are.startswith("huge") else 0]

        def some(array: object, begin: int, end: int) -> bool:
            left[0] -= 1
            return left[0] >= 0 and real(array, begin, end)  # type: ignore[arg-type]

        monkeypatch.setattr(pages, "collapse", some)
    want = random.Random(1).randbytes(SIZE)
    writer, order = new(shm), random.Random(2).sample(range(COUNT), COUNT)
    with ThreadPoolExecutor(8) as pool:
        reserved = pool.submit(writer.reserve, never)
        wrote = list(
            pool.map(lambda i: writer.write(i * RANGE, memoryview(want[i * RANGE : (i + 1) * RANGE]), never), order)
        )
        assert reserved.result() and all(wrote)
    assert shm.read_bytes() == want
    assert os.stat(shm).st_blocks * 512 >= SIZE, "every page is there"


def test_without_a_reservation_bytes_are_written(shm: Path) -> None:
    writer = new(shm)
    assert writer.write(RANGE, memoryview(b"x" * RANGE), never)
    assert shm.read_bytes()[RANGE - 1 : RANGE + 1] == b"\0x"


def test_a_writer_waits_for_pages_that_are_on_their_way_and_no_longer_than_asked(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, begun, real = threading.Event(), threading.Event(), module.reserve

    def slow(*args: object) -> bool:
        begun.set()
        assert hold.wait(60)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "reserve", slow)
    writer, stop = new(shm), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        reserving = pool.submit(writer.reserve, never)
        assert begun.wait(60)
        given_up = pool.submit(writer.write, 0, memoryview(b"a"), stop.is_set)
        waiting = pool.submit(writer.write, 0, memoryview(b"b"), never)
        stop.set()
        assert given_up.result(60) is False and not waiting.done()
        hold.set()
        assert reserving.result(60) and waiting.result(60)
    assert shm.read_bytes()[:1] == b"b"


def test_a_writer_waits_for_a_reservation_that_is_announced(shm: Path) -> None:
    writer = new(shm)
    writer.expect_pages()
    assert not writer.write(0, memoryview(b"a"), lambda: True), "given up: it would have been written into a hole"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(writer.write, 0, memoryview(b"b"), never)
        assert writer.reserve(never) and waiting.result(60)
    assert shm.read_bytes()[:1] == b"b"


def test_no_room_ends_the_waiting_and_the_descriptor_closes_once(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(module, "reserve", full)
    writer = new(shm)
    with pytest.raises(OSError, match="full"):
        writer.reserve(never)
    assert writer.write(0, memoryview(b"z"), never), "whoever waited goes on, and meets the error itself"
    fd = writer.fd
    del writer
    with pytest.raises(OSError):
        os.fstat(fd)
