"""P2 for files that workers do not hash again: verified once by the weight service, sealed by the kernel."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.standin import StandIn
from components.common.errors import DynamoBlobError
from components.common.loading import mapped, pages
from components.common.loading.client import ServiceClient
from components.common.loading.mapped import SEALS, take_sealed
from components.common.loading.report import Report
from components.common.loading.session import open_session
from components.common.messages.weights import HANDOVER_SUFFIX
from components.common.registry.manifest import FileEntry, Manifest
from components.weights.cache import NodeCache
from components.weights.sealed import Sealer, seal
from tests.faults import stores
from tests.faults.releases import MiB, digests, make_release, random_model, tensors_of, weights_config
from tests.faults.services import ServiceProcess, ServiceThread

store = stores.store

SHARDS = [tensors_of(s, [700_000, 2_500_000, 3, 900_000]) for s in range(3)]
WANTED = digests({k: v for s in SHARDS for k, v in s.items()})
PATIENCE_S = 60.0


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    random_model(tmp_path / "model", SHARDS)
    return make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB // 2)


def files(manifest: Manifest) -> list[FileEntry]:
    return [f for f in manifest.files if f.path.endswith(".safetensors")]


def total(manifest: Manifest) -> int:
    return sum(f.size for f in files(manifest))


def service(
    root: Path, store: StandIn, manifest: Manifest, kind: Any = ServiceThread, budget: int = 64 * MiB, **config: Any
) -> Any:
    weights = weights_config(store.url, root / "w", manifest)
    return kind(root / "s", weights, cache_dir=str(root / "cache"), cache_bytes=budget, **config)


def load(root: Path, store: StandIn, manifest: Manifest, address: str, **changes: Any) -> dict[str, Any]:
    report = Report()
    config = weights_config(store.url, root / "w", manifest, service=address, **changes)
    with open_session(config, None, report) as session:
        assert digests(dict(session.tensors())) == WANTED
    return report.as_json()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def sealed(running: Any, count: int) -> None:
    until(lambda: running.status()["cache"]["sealed"] == count)


def ask(address: str, file: FileEntry) -> tuple[socket.socket, int]:
    """The descriptor as the service hands it over, and the connection that leases it."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address.removeprefix("unix:") + HANDOVER_SUFFIX)
    connection.sendall(file.blake3.encode() + b"\n")
    _, fds, _, _ = socket.recv_fds(connection, 4096, 1)
    return connection, fds[0]


@contextlib.contextmanager
def stranger(address: str, make: Callable[[str], int]) -> Iterator[None]:
    """Somebody else on the hand-over socket; `make(digest)` gives the descriptor it hands over."""
    path = Path(address.removeprefix("unix:") + HANDOVER_SUFFIX)
    path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            fd = make(connection.recv(65).decode().strip())
            socket.send_fds(connection, [b'{"sealed": true}\n'], [fd])
            os.close(fd)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


def test_later_workers_take_everything_from_sealed_memory(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    with service(tmp_path, store, manifest) as running:
        load(tmp_path, store, manifest, running.socket)
        sealed(running, 3)
        before = dict(store.served)
        report = load(tmp_path, store, manifest, running.socket)
        assert report["sealed_bytes"] == total(manifest) and report["bytes_by_source"] == {"cache": total(manifest)}
        assert store.served == before, "0 bytes from Blob"
        until(lambda: running.status()["cache"]["leases"] == 0)
        # negative control: a plan that trusts nobody hashes every byte, from the files on tmpfs
        report = load(tmp_path, store, manifest, running.socket, sealed_uid=-2)
        assert "sealed_bytes" not in report and report["bytes_by_source"] == {"cache": total(manifest)}


def test_nobody_can_change_what_was_handed_over(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    with service(tmp_path, store, manifest) as running:
        load(tmp_path, store, manifest, running.socket)
        sealed(running, 3)
        file = files(manifest)[0]
        connection, fd = ask(running.socket, file)
        before = os.pread(fd, file.size, 0)
        attempts: dict[str, Callable[[], Any]] = {
            "write": lambda: os.pwrite(fd, b"x", 100),
            "shrink": lambda: os.ftruncate(fd, 10),
            "grow": lambda: os.ftruncate(fd, file.size + 1),
            "map for writing": lambda: mmap.mmap(fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE),
            "punch a hole": lambda: os.posix_fallocate(fd, file.size, 4096),
            "take the seals off": lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0),
            "write through /proc": lambda: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x", 100),
        }  # fmt: skip
        for name, attempt in attempts.items():
            with pytest.raises(PermissionError) as e:
                attempt()
            assert e.value.errno == errno.EPERM, name
        one, other = (take_sealed(ServiceClient(running.socket), file, -1) for _ in range(2))
        assert one is not None and other is not None
        one.array[100] ^= 0xFF  # the loader's mapping is private: what an engine writes there is its own
        assert other.array[100] == before[100] and os.pread(fd, file.size, 0) == before
        os.close(fd)
        connection.close()


def memory(content: bytes, seals: int = SEALS) -> int:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("what", ["no_seals", "writable", "may_shrink", "truncated", "longer", "a_file", "a_pipe"])
def test_what_is_not_sealed_or_not_whole_is_refused_and_every_byte_hashed(
    tmp_path: Path, store: StandIn, manifest: Manifest, what: str
) -> None:
    content = {f.blake3: (tmp_path / "store/weights" / f.blob).read_bytes() for f in files(manifest)}

    def make(digest: str) -> int:
        data = content[digest]
        if what == "a_file":
            (tmp_path / "copy").write_bytes(data)
            return os.open(tmp_path / "copy", os.O_RDONLY)
        if what == "a_pipe":
            reader, writer = os.pipe()
            os.close(writer)
            return reader
        seals = {"no_seals": 0, "writable": SEALS & ~fcntl.F_SEAL_WRITE, "may_shrink": SEALS & ~fcntl.F_SEAL_SHRINK}
        cut = {"truncated": data[:-1], "longer": data + b"x"}
        return memory(cut.get(what, data), seals.get(what, SEALS))

    with service(tmp_path, store, manifest, seal=False) as running, stranger(running.socket, make):
        report = load(tmp_path, store, manifest, running.socket)
    assert report["sealed_refused"] == 3 and "sealed_bytes" not in report
    assert report["bytes_by_source"] == {"cache": total(manifest)}


def test_a_service_that_hands_over_something_else_ends_the_load(
    tmp_path: Path, store: StandIn, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sealed, of the right size, and wrong: what the drawn range says about the service holds for the whole file."""
    content = {f.blake3: bytearray((tmp_path / "store/weights" / f.blob).read_bytes()) for f in files(manifest)}
    last = files(manifest)[-1]
    content[last.blake3][-1] ^= 1
    with (
        service(tmp_path, store, manifest, seal=False) as running,
        stranger(running.socket, lambda digest: memory(bytes(content[digest]))),
    ):
        monkeypatch.setattr(mapped.random.SystemRandom, "randrange", lambda self, n: n - 1)
        with pytest.raises(DynamoBlobError) as e:
            load(tmp_path, store, manifest, running.socket)
    assert e.value.code == "WEIGHTS-DIGEST-MISMATCH" and e.value.data["file"] == last.path
    assert e.value.data["range"] == len(last.ranges) - 1 and "sealed" in e.value.data["source"]


def test_only_the_service_that_the_plan_names_is_believed(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    with service(tmp_path, store, manifest) as running:
        load(tmp_path, store, manifest, running.socket)
        sealed(running, 3)
        report = load(tmp_path, store, manifest, running.socket, sealed_uid=os.geteuid() + 1)
        assert report["sealed_refused"] == 3 and "sealed_bytes" not in report
        assert load(tmp_path, store, manifest, running.socket, sealed_uid=os.geteuid())["sealed_bytes"] > 0


def test_a_service_killed_in_the_middle_of_a_load(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    """The pages of a mapped file live as long as the mapping; the next file is had without the service."""
    running = service(tmp_path, store, manifest, ServiceProcess).start()
    load(tmp_path, store, manifest, running.socket)
    sealed(running, 3)
    report = Report()
    config = weights_config(store.url, tmp_path / "w", manifest, service=running.socket, range_in_flight=1)
    with open_session(config, None, report) as session:
        stream = session.tensors()
        held = dict([next(stream)])
        running.kill()
        held.update(stream)
        assert digests(held) == WANTED
    assert report.as_json()["sealed_bytes"] >= files(manifest)[0].size
    running.start()  # the dead one's socket is in the way of nobody; the files on tmpfs are still there
    before = dict(store.served)
    load(tmp_path, store, manifest, running.socket)
    sealed(running, 3)
    load(tmp_path, store, manifest, running.socket)
    objects = [f"weights/{f.blob}" for f in files(manifest)]
    assert [store.served[o] for o in objects] == [before[o] for o in objects]
    running.stop()
    assert list((tmp_path / "s").glob("*.sock*")) == []


@pytest.mark.parametrize("spoil", ["altered", "truncated", "gone"])
def test_a_file_changed_before_it_is_sealed_is_not_sealed(tmp_path: Path, manifest: Manifest, spoil: str) -> None:
    file = files(manifest)[0]
    path = tmp_path / "file"
    path.write_bytes((tmp_path / "store/weights" / file.blob).read_bytes())
    os.close(seal(file, str(path), MiB // 2))
    if spoil == "altered":
        with path.open("r+b") as f:
            f.seek(file.size - 1)
            f.write(bytes([path.read_bytes()[-1] ^ 1]))
        with pytest.raises(DynamoBlobError, match="WEIGHTS-DIGEST-MISMATCH"):
            seal(file, str(path), MiB // 2)
        return
    os.truncate(path, file.size // 2) if spoil == "truncated" else path.unlink()
    with pytest.raises(OSError):
        seal(file, str(path), MiB // 2)


def filled(root: Path, manifest: Manifest, budget: int) -> tuple[NodeCache, Callable[[FileEntry], Any]]:
    """A cache and how a file gets into it, without service and store."""
    cache = NodeCache(root / "cache", budget)

    def put(file: FileEntry) -> Any:
        entry, work = cache.lease(file)
        if work:
            cache.reserve(entry)
            data = (root / "store/weights" / file.blob).read_bytes()
            assert cache.write(entry, 0, memoryview(data))
            for index in work:
                cache.verified(entry, index)
        cache.release(entry)
        return entry

    return cache, put


def test_sealed_copies_count_and_go_first(tmp_path: Path, manifest: Manifest) -> None:
    one, two, three = files(manifest)
    cache, put = filled(tmp_path, manifest, one.size + two.size + three.size - 1)
    sealer = Sealer(cache, Report(), manifest.range_bytes)
    put(one)
    until(lambda: cache.status()["sealed"] == 1)
    assert cache.used == 2 * one.size
    lease = cache.lease_sealed(one.blake3)
    assert lease is not None
    with pytest.raises(DynamoBlobError, match="WEIGHTS-CACHE-FULL"):  # what a worker maps stays
        held = cache.lease(one)[0]
        put(two)
    cache.release(held)
    cache.release(lease)
    put(two)
    status = cache.status()
    assert (status["sealed"], status["present"], status["evicted"]) == (0, 2, 0), "the copy goes, the files stay"
    put(three)  # no room beside two files: the oldest file goes
    assert cache.status()["evicted"] == 1 and cache.used <= cache.budget
    sealer.close()
    cache.close()


def test_a_copy_in_the_making_gives_way(tmp_path: Path, manifest: Manifest) -> None:
    one, two, _ = files(manifest)
    cache, put = filled(tmp_path, manifest, one.size + two.size)
    put(one)
    making = cache.begin_sealing(one)
    assert making is not None and cache.begin_sealing(one) is None
    put(two)  # takes its room
    assert making.given_up and cache.used == one.size + two.size
    fd = os.memfd_create("late")
    cache.end_sealing(making, fd)
    with pytest.raises(OSError):
        os.fstat(fd)
    assert cache.lease_sealed(one.blake3) is None and cache.status()["sealed"] == 0
    cache.close()


def test_no_copies_where_they_would_take_the_room_of_other_files(tmp_path: Path, manifest: Manifest) -> None:
    one, two, three = files(manifest)
    cache, put = filled(tmp_path, manifest, one.size + two.size + three.size + one.size - 1)
    cache.adopt(files(manifest))
    put(one)
    assert cache.begin_sealing(one) is None
    cache.close()


def test_a_file_altered_on_tmpfs_is_found_by_sealing_it(tmp_path: Path, manifest: Manifest) -> None:
    file = files(manifest)[0]
    cache, put = filled(tmp_path, manifest, 64 * MiB)
    entry = put(file)
    with entry.path.open("r+b") as f:
        f.seek(5000)
        f.write(b"\xaa\x55\xaa")
    report = Report()
    sealer = Sealer(cache, report, manifest.range_bytes)
    cache.completed(entry)
    until(lambda: cache.entry(file.blake3) is None)
    sealer.close()
    assert report.as_json()["cache_altered"] == 1 and cache.status()["sealed"] == 0
    assert list((tmp_path / "cache/objects").iterdir()) == []
    cache.close()


def test_without_huge_pages_everything_works(
    tmp_path: Path, store: StandIn, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux before 6.1 and 5.14: neither MADV_COLLAPSE nor MADV_POPULATE_READ."""
    monkeypatch.setattr(pages, "_COLLAPSE", 9999)
    monkeypatch.setattr(pages, "_POPULATE_READ", 9999)
    with service(tmp_path, store, manifest) as running:
        load(tmp_path, store, manifest, running.socket)
        sealed(running, 3)
        assert load(tmp_path, store, manifest, running.socket)["sealed_bytes"] == total(manifest)


def test_huge_pages_are_asked_for_where_a_file_has_room_for_them(tmp_path: Path) -> None:
    fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING)
    size = 2 * pages.HUGE + 5000
    os.ftruncate(fd, size)
    array = pages.map_file(fd, size)
    assert array.ctypes.data % pages.HUGE == 0 and not array.flags.writeable
    os.pwrite(fd, b"before", pages.HUGE + 1)
    pages.reserve(fd, array, 0, size)
    assert os.fstat(fd).st_blocks * 512 >= size, "every byte has its page"
    assert bytes(array[pages.HUGE + 1 :][:6]) == b"before", "what was written stays"
    os.close(fd)
