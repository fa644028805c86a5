"""The node cache and the ranks' shared memory under hostile conditions: full, littered, raced for, changed underneath."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bench.standin import StandIn
from components.common.errors import DynamoBlobError
from components.common.loading.files import materialise_small_files
from components.common.loading.ranks import Ranks, sweep_dead
from components.common.loading.report import Report
from components.common.loading.session import open_session
from components.common.registry.manifest import Manifest
from tests.faults import stores
from tests.faults.proxy import FaultProxy, Rule
from tests.faults.releases import MiB, digests, make_release, random_model, tensors_of, weights_config
from tests.faults.services import ServiceProcess, ServiceThread

store = stores.store

SHARDS = [tensors_of(s, [700_000, 0, 1_500_000, 3, 900_000]) for s in range(3)]
WANTED = digests({k: v for s in SHARDS for k, v in s.items()})
OBJECTS = r"GET .*/objects/"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    random_model(tmp_path / "model", SHARDS)
    (tmp_path / "model/empty.txt").write_bytes(b"")
    return make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB // 4)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 5 MiB; a shard has 3.1 MB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", path]).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def load(url: str, work: Path, manifest: Manifest, service: str = "") -> dict[str, object]:
    report = Report()
    with open_session(weights_config(url, work, manifest, service=service), None, report) as session:
        tensors: dict[str, torch.Tensor] = dict(session.tensors())
    assert digests(tensors) == WANTED
    return report.as_json()


def weight_bytes(store: StandIn, manifest: Manifest) -> dict[str, int]:
    return {f.path: store.served[f"weights/{f.blob}"] for f in manifest.files if f.path.endswith(".safetensors")}


def sizes(manifest: Manifest) -> dict[str, int]:
    return {f.path: f.size for f in manifest.files if f.path.endswith(".safetensors")}


def service(root: Path, url: str, manifest: Manifest, cache: Path, name: str = "weights-0") -> ServiceProcess:
    return ServiceProcess(
        root / "s", weights_config(url, root / "w", manifest), name=name, cache_dir=str(cache), cache_bytes=64 * MiB
    )


def test_a_full_tmpfs_costs_the_cache_not_the_service(
    tmp_path: Path, store: StandIn, manifest: Manifest, small: Path
) -> None:
    """The budget promises more than the volume has: a hole written without a page behind it would be SIGBUS."""
    with service(tmp_path, store.url, manifest, small / "cache") as running:
        report = load(store.url, tmp_path / "w", manifest, running.socket)
        assert report["lease.WEIGHTS-CACHE-FULL"] == 2
        one, two, three = sizes(manifest).values()
        assert report["bytes_by_source"] == {"cache": one, "blob": two + three}
        assert running.process is not None and running.process.poll() is None
        assert running.status()["cache"]["refused"] == 2
    assert list((small / "cache/partial").iterdir()) == []


def test_a_volume_full_from_the_start_means_no_cache(
    tmp_path: Path, store: StandIn, manifest: Manifest, small: Path
) -> None:
    for name in ("objects", "partial", "manifests"):
        (small / "cache" / name).mkdir(parents=True)
    (small / "cache/lock").touch()
    with pytest.raises(OSError), (small / "filler").open("wb", buffering=0) as f:
        while True:
            f.write(b"\1" * 4096)
    with service(tmp_path, store.url, manifest, small / "cache") as running:
        report = load(store.url, tmp_path / "w", manifest, running.socket)
        assert report["bytes_by_source"] == {"blob": sum(sizes(manifest).values())}
        assert report["lease.WEIGHTS-CACHE-FULL"] == 3


def test_litter_in_the_cache_directory_is_cleared_at_the_start(
    tmp_path: Path, store: StandIn, manifest: Manifest
) -> None:
    objects, partial = tmp_path / "cache/objects", tmp_path / "cache/partial"
    objects.mkdir(parents=True)
    partial.mkdir()
    (objects / "dangling").symlink_to(tmp_path / "nowhere")
    (objects / "directory").mkdir()
    (objects / "directory/inside").write_text("x")
    (partial / "directory").mkdir()
    first, second, _ = [f for f in manifest.files if f.path.endswith(".safetensors")]
    (objects / first.blake3).write_bytes(b"")
    (objects / second.blake3).mkdir()
    os.mkfifo(objects / "fifo")
    with service(tmp_path, store.url, manifest, tmp_path / "cache") as running:
        report = load(store.url, tmp_path / "w", manifest, running.socket)
        assert report["bytes_by_source"] == {"cache": sum(sizes(manifest).values())}
    assert sorted(p.name for p in objects.iterdir()) == sorted(
        f.blake3 for f in manifest.files if f.path.endswith(".safetensors")
    )
    assert list(partial.iterdir()) == []


def test_of_services_that_race_for_a_directory_one_serves(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    racing = [service(tmp_path, store.url, manifest, tmp_path / "cache", f"weights-{i}") for i in range(3)]
    for s in racing:
        s.start(wait_s=0)
    end = time.monotonic() + 60
    alive = racing
    while len(alive) > 1 and time.monotonic() < end:
        alive = [s for s in racing if s.process is not None and s.process.poll() is None]
        time.sleep(0.05)
    try:
        assert len(alive) == 1
        assert all("WEIGHTS-CACHE-TAKEN" in s.log.read_text() for s in racing if s not in alive)
        alive[0].client.wait_ready(time.monotonic() + 30)
        load(store.url, tmp_path / "w", manifest, alive[0].socket)
        assert weight_bytes(store, manifest) == sizes(manifest)
    finally:
        for s in racing:
            s.kill()


def test_a_service_restarted_under_open_leases(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    with FaultProxy("127.0.0.1", store.port) as proxy:
        url = proxy.url("standin")
        running = service(tmp_path, url, manifest, tmp_path / "cache").start()
        load(url, tmp_path / "w", manifest, running.socket)
        with open_session(
            weights_config(url, tmp_path / "w", manifest, service=running.socket), None, Report()
        ) as session:
            stream = session.tensors()
            held = dict(next(stream) for _ in range(3))
            running.kill()
            running.start()  # adopts what is complete; the loader's mappings are of the same files
            held.update(stream)
        assert digests(held) == WANTED
        before = proxy.body_bytes
        report = load(url, tmp_path / "w", manifest, running.socket)
        assert report["bytes_by_source"] == {"cache": sum(sizes(manifest).values())}
        assert proxy.body_bytes - before < 10_000, "manifest at most"
        assert running.stop() == 0


@pytest.mark.parametrize("through", ["blob", "service"])
def test_an_object_that_changes_in_the_middle_of_the_load(
    tmp_path: Path, store: StandIn, manifest: Manifest, through: str
) -> None:
    last = [f for f in manifest.files if f.path.endswith(".safetensors")][-1]
    with FaultProxy("127.0.0.1", store.port) as proxy:
        url = proxy.url("standin")
        proxy.rules = [Rule("flip", OBJECTS + last.blake3, skip=3, after=50)]
        weights = weights_config(url, tmp_path / "w", manifest)
        cache = {"cache_dir": str(tmp_path / "cache"), "cache_bytes": 64 * MiB}
        with ServiceThread(tmp_path / "s", weights, **cache) as running, pytest.raises(DynamoBlobError) as e:
            load(url, tmp_path / "w", manifest, running.socket if through == "service" else "")
    assert e.value.code == "WEIGHTS-DIGEST-MISMATCH" and e.value.data["file"] == last.path
    assert last.blake3 not in [p.name for p in (tmp_path / "cache/objects").iterdir()]


@pytest.mark.parametrize("through", ["blob", "service"])
def test_a_release_that_is_removed_in_the_middle_of_the_load(
    tmp_path: Path, store: StandIn, manifest: Manifest, through: str
) -> None:
    """Manifest and objects go after the first ranges were read: refused, with the object's name, and nothing is kept of it."""
    last = [f for f in manifest.files if f.path.endswith(".safetensors")][-1]
    with FaultProxy("127.0.0.1", store.port) as proxy:
        url = proxy.url("standin")
        proxy.rules = [Rule("missing", OBJECTS + last.blake3, skip=3), Rule("missing", "releases/", skip=4)]
        weights = weights_config(url, tmp_path / "w", manifest)
        cache = {"cache_dir": str(tmp_path / "cache"), "cache_bytes": 64 * MiB}
        with ServiceThread(tmp_path / "s", weights, **cache) as running, pytest.raises(DynamoBlobError) as e:
            load(url, tmp_path / "w", manifest, running.socket if through == "service" else "")
    assert e.value.code == "STORAGE-NOT-FOUND" and last.blake3 in e.value.where
    assert last.blake3 not in [p.name for p in (tmp_path / "cache/objects").iterdir()]
    assert list((tmp_path / "cache/partial").iterdir()) == []


@pytest.mark.parametrize("through", ["blob", "service"])
def test_sixty_four_small_shards(tmp_path: Path, store: StandIn, through: str) -> None:
    shards = [{**tensors_of(s, [1000 + s, 0, 17]), f"void{s}": torch.empty(0, 4)} for s in range(64)]
    random_model(tmp_path / "many", shards)
    manifest = make_release(tmp_path / "store", tmp_path / "many", model="many", range_bytes=512)
    with ServiceThread(
        tmp_path / "s", weights_config(store.url, tmp_path / "w", manifest), cache_dir=str(tmp_path / "cache"), cache_bytes=64 * MiB
    ) as running:  # fmt: skip
        config = weights_config(
            store.url, tmp_path / "w", manifest, service=running.socket if through == "service" else ""
        )
        with open_session(config, None, Report()) as session:
            found = dict(session.tensors())
    assert digests(found) == digests({k: v for s in shards for k, v in s.items()})
    assert found["void7"].shape == (0, 4)
    assert weight_bytes(store, manifest) == sizes(manifest)


def test_an_empty_small_file(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    path = materialise_small_files(weights_config(store.url, tmp_path / "w", manifest))
    assert (path / "empty.txt").read_bytes() == b""


def test_ranks_on_full_shared_memory_are_told_so(
    tmp_path: Path, store: StandIn, manifest: Manifest, small: Path
) -> None:
    def rank(r: int) -> str:
        config = weights_config(store.url, tmp_path / str(r), manifest, deadline_s=15.0)
        try:
            with open_session(config, None, Report(), ranks=Ranks(r, 2, f"{os.getpid()}-full", str(small))) as session:
                tensors = dict(session.tensors())
            return str(len(tensors))
        except DynamoBlobError as e:
            return e.code

    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(rank, range(2)))
    assert "WEIGHTS-SHM-FULL" in found  # the other rank hears of it in the way that comes first
    assert found <= {"WEIGHTS-SHM-FULL", "WEIGHTS-RANK-MISSING", "WEIGHTS-RANK-FAILED", "WEIGHTS-DEADLINE"}
    assert list(small.iterdir()) == []


def test_shared_files_of_killed_ranks_go(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    file = "ab" * 16
    names = {
        "old": f"dynamo-blob-{dead.pid}-0123456789ab-{file}", "board": f"dynamo-blob-{dead.pid}-0123456789ab-{file}.board",
        "young": f"dynamo-blob-{dead.pid}-aaaaaaaaaaaa-{file}", "alive": f"dynamo-blob-{os.getpid()}-0123456789ab-{file}",
        "another's": "dynamo-blob-0123456789ab",
    }  # fmt: skip
    for kind, name in names.items():
        (tmp_path / name).touch()
        if kind != "young":
            os.utime(tmp_path / name, (1, 1))
    sweep_dead(str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {names["young"], names["alive"], names["another's"]}
