"""P5: N replicas read the weights from Blob once. Counted by the store, outside our code."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.standin import StandIn
from components.common.loading.config import WeightsConfig
from components.common.loading.report import Report
from components.common.loading.session import open_session
from components.common.registry.manifest import Manifest
from tests.faults import stores
from tests.faults.proxy import FaultProxy, Rule
from tests.faults.releases import MiB, digests, make_release, random_model, tensors_of, weights_config
from tests.faults.services import ServiceProcess, ServiceThread

store = stores.store

SHARDS = [tensors_of(s, [700_000, 1_500_000, 3, 900_000]) for s in range(3)]
WANTED = digests({k: v for s in SHARDS for k, v in s.items()})


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    random_model(tmp_path / "model", SHARDS)
    return make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB // 2)


def objects(store: StandIn, manifest: Manifest) -> dict[str, int]:
    """Bytes that left the store, by weight file."""
    return {f.path: store.served[f"weights/{f.blob}"] for f in manifest.files if f.path.endswith(".safetensors")}


def once(manifest: Manifest) -> dict[str, int]:
    return {f.path: f.size for f in manifest.files if f.path.endswith(".safetensors")}


def load(config: WeightsConfig) -> dict[str, Any]:
    """One replica's load; every tensor is kept and its bytes compared afterwards."""
    report = Report()
    with open_session(config, None, report) as session:
        tensors: dict[str, torch.Tensor] = dict(session.tensors())
    assert digests(tensors) == WANTED
    return report.as_json()


def cached(tmp_path: Path, store_url: str, manifest: Manifest, kind: Any = ServiceThread, **config: Any) -> Any:
    weights = weights_config(store_url, tmp_path / "w", manifest)
    return kind(
        tmp_path / "s",
        weights,
        cache_dir=str(tmp_path / "cache"),
        cache_bytes=config.pop("cache_bytes", 64 * MiB),
        **config,
    )


def no_leases(service: Any) -> bool:
    """Whether the service notices within 10 s that nobody maps anything any more."""
    end = time.monotonic() + 10
    while (held := service.status()["cache"]["leases"]) and time.monotonic() < end:
        time.sleep(0.05)
    return not held


def test_four_replicas_at_once_read_each_byte_once(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    with cached(tmp_path, store.url, manifest) as service:
        config = weights_config(store.url, tmp_path / "w", manifest, service=service.socket)
        with ThreadPoolExecutor(4) as pool:
            reports = list(pool.map(lambda _: load(config), range(4)))
        assert objects(store, manifest) == once(manifest)
        total = sum(once(manifest).values())
        assert [r["bytes_by_source"] for r in reports] == [{"cache": total}] * 4
        # negative control: without the service each replica reads everything itself
        load(weights_config(store.url, tmp_path / "w", manifest))
        assert objects(store, manifest) == {k: 2 * v for k, v in once(manifest).items()}


def test_restarted_service_and_worker_take_nothing_from_blob(
    tmp_path: Path, store: StandIn, manifest: Manifest
) -> None:
    service = cached(tmp_path, store.url, manifest).start()
    config = weights_config(store.url, tmp_path / "w", manifest, service=service.socket)
    load(config)
    before = objects(store, manifest)
    load(config)
    service.stop()
    service = cached(tmp_path, store.url, manifest).start()
    load(config)
    assert objects(store, manifest) == before == once(manifest)
    status = service.status()
    assert status["load"]["bytes_by_source"] == {"cache_checked": sum(before.values())}, (
        "what lay there was checked before it was served"
    )
    service.stop()


def test_cache_files_are_read_only_and_of_another_owner(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    with cached(tmp_path, store.url, manifest) as service:
        load(weights_config(store.url, tmp_path / "w", manifest, service=service.socket))
        for path in (tmp_path / "cache/objects").iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o444
            if os.geteuid() == 0:
                assert path.stat().st_uid == service.config.cache_uid != os.geteuid()


@pytest.mark.parametrize("spoil", ["altered", "truncated", "longer", "renamed", "half_filled", "symlink"])
def test_spoiled_entries_are_never_served(tmp_path: Path, store: StandIn, manifest: Manifest, spoil: str) -> None:
    service = cached(tmp_path, store.url, manifest).start()
    config = weights_config(store.url, tmp_path / "w", manifest, service=service.socket)
    load(config)
    service.stop()
    one, two, _ = sorted((tmp_path / "cache/objects").iterdir())
    os.chmod(one, 0o644)
    if spoil == "altered":
        data = bytearray(one.read_bytes())
        data[len(data) // 2] ^= 1
        one.write_bytes(data)
    elif spoil == "truncated":
        os.truncate(one, one.stat().st_size - 5)
    elif spoil == "longer":
        one.write_bytes(one.read_bytes() + b"x")
    elif spoil == "renamed":
        one.write_bytes(two.read_bytes())
    elif spoil == "half_filled":
        size = one.stat().st_size
        os.truncate(one, size // 2)
        os.truncate(one, size)
    else:
        one.rename(tmp_path / "elsewhere")
        one.symlink_to(tmp_path / "elsewhere")
    service = cached(tmp_path, store.url, manifest).start()
    load(config)  # right bytes, whatever lay there
    load(config)
    service.stop()


def test_entry_altered_under_a_running_service_is_noticed(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    with cached(tmp_path, store.url, manifest) as service:
        config = weights_config(store.url, tmp_path / "w", manifest, service=service.socket)
        load(config)
        for i, path in enumerate(sorted((tmp_path / "cache/objects").iterdir())):
            os.chmod(path, 0o644)
            with path.open("r+b") as f:
                f.seek(1000 + i)
                f.write(b"\0\1\2")
            info = path.stat()
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
        load(config)


def test_budget_holds_lru_goes_and_leased_files_stay(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    sizes = list(once(manifest).values())
    with cached(tmp_path, store.url, manifest, cache_bytes=2 * max(sizes) + 10) as service:
        config = weights_config(store.url, tmp_path / "w", manifest, service=service.socket)
        report = load(config)  # keeps every tensor: two files stay mapped, the third finds no room and is read directly
        assert report["bytes_by_source"] == {"cache": sizes[0] + sizes[1], "blob": sizes[2]}
        assert report["lease.WEIGHTS-CACHE-FULL"] == 1
        report = Report()
        with open_session(config, None, report) as session:
            found = {}
            for name, tensor in session.tensors():
                found.update(digests({name: tensor}))
                del tensor
        assert found == WANTED
        status = service.status()["cache"]
        assert status["used_bytes"] <= status["budget_bytes"] and no_leases(service)
        held = sum(
            p.stat().st_size
            for p in (tmp_path / "cache").rglob("*")
            if p.is_file() and p.parent.name in ("objects", "partial")
        )
        assert held <= status["budget_bytes"]


def test_kill_9_while_filling_leaves_nothing_and_pins_nothing(
    tmp_path: Path, store: StandIn, manifest: Manifest
) -> None:
    with FaultProxy("127.0.0.1", store.port) as proxy:
        proxy.rules = [Rule("cap", match="objects", rate=2_000_000)]
        service = cached(tmp_path, proxy.url("standin"), manifest, ServiceProcess).start()
        config = weights_config(store.url, tmp_path / "w", manifest, service=service.socket)
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load, config)
            while not any(p.stat().st_size for p in (tmp_path / "cache/partial").iterdir()):
                assert not loading.done()
            service.kill()
            report = loading.result(60)  # the loader goes on by itself, verified, and says so
        assert report["bytes_by_source"]["blob"] > 0
        assert report.get("cache_lost_ranges", 0) + report.get("service_lost", 0) > 0
        proxy.rules = []
        service.start()
        assert list((tmp_path / "cache/partial").iterdir()) == []
        load(config)
        service.stop()
    assert list((tmp_path / "cache/partial").iterdir()) == []


def test_a_killed_worker_pins_nothing(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    with cached(tmp_path, store.url, manifest) as service:
        config = weights_config(store.url, tmp_path / "w", manifest, service=service.socket)
        code = (
            "import sys, os\nfrom components.common.loading.config import WeightsConfig\nfrom components.common.loading.report import Report\n"
            "from components.common.loading.session import open_session\n"
            "with open_session(WeightsConfig.model_validate_json(sys.argv[1]), None, Report()) as s:\n"
            "    kept = dict(s.tensors())\n    print('loaded', flush=True)\n    sys.stdin.read()\n"
        )
        worker = subprocess.Popen(
            [sys.executable, "-c", code, config.model_dump_json()], stdout=subprocess.PIPE, stdin=subprocess.PIPE
        )
        assert worker.stdout is not None and worker.stdout.readline() == b"loaded\n"
        assert service.status()["cache"]["leases"] == 3, "pinned while mapped"
        worker.kill()
        worker.wait()
        assert no_leases(service)


def test_two_services_never_share_a_directory(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    with cached(tmp_path, store.url, manifest):
        second = cached(tmp_path, store.url, manifest, ServiceProcess, name="weights-1")
        second.start(wait_s=0)
        assert second.process is not None and second.process.wait(30) == 1
        assert "WEIGHTS-CACHE-TAKEN" in second.log.read_text()
