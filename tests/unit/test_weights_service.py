"""The weight service and the files of a release, over the real socket."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.standin import StandIn
from components.common.errors import DynamoBlobError
from components.common.loading.files import materialise_small_files
from components.common.loading.mapped import lease
from components.common.registry.manifest import Manifest
from components.weights.cache import NodeCache
from tests.faults import stores
from tests.faults.releases import MiB, make_release, random_model, tensors_of, weights_config
from tests.faults.services import ServiceProcess
from tests.kvtools.proxy import wait_for

store = stores.store


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    random_model(tmp_path / "model", [tensors_of(1, [300_000] * 4)])
    return make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB)


def test_service_answers_and_small_files_are_made_once_verified(
    tmp_path: Path, store: StandIn, manifest: Manifest
) -> None:
    config = weights_config(store.url, tmp_path / "w", manifest)
    with ServiceProcess(tmp_path / "s", config) as service:
        assert service.client.release().manifest_digest == manifest.digest()
        assert service.client.manifest() == manifest.canonical()
        sources = service.client.sources(manifest.files[-1].blake3)
        assert [r[-1].kind for r in sources.ranges] == ["blob"] * len(manifest.files[-1].ranges)
        with pytest.raises(DynamoBlobError, match="WEIGHTS-UNKNOWN-OBJECT"):
            service.client.sources("0" * 64)
        used = weights_config(store.url, tmp_path / "w", manifest, service=service.socket)
        with ThreadPoolExecutor(4) as pool:  # four workers at once: one directory
            paths = set(pool.map(lambda _: materialise_small_files(used), range(4)))
        assert paths == {Path(used.root) / manifest.weights_digest}
        path = paths.pop()
        assert sorted(p.name for p in path.iterdir()) == [
            "chat_template.jinja",
            "config.json",
            "manifest.json",
            "tokenizer.json",
        ]
        assert (path / "config.json").read_bytes() == (tmp_path / "model/config.json").read_bytes()
        assert [p.name for p in Path(used.root).iterdir()] == [manifest.weights_digest], "no leftovers"
        assert service.stop() == 0
    assert not Path(service.socket[5:]).exists()


def test_altered_missing_or_added_small_file_is_replaced_before_use(
    tmp_path: Path, store: StandIn, manifest: Manifest
) -> None:
    config = weights_config(store.url, tmp_path / "w", manifest)
    path = materialise_small_files(config)
    wanted = {p.name: p.read_bytes() for p in path.iterdir()}
    for spoil in (
        lambda: (path / "config.json").write_text("{}"),
        lambda: (path / "tokenizer.json").unlink(),
        lambda: (path / "evil.py").write_text("x"),
        lambda: (path / "manifest.json").write_text("{}"),
        lambda: os.truncate(path / "tokenizer.json", 10),
    ):
        spoil()
        assert materialise_small_files(config) == path
        assert {p.name: p.read_bytes() for p in path.iterdir()} == wanted


def test_workers_that_start_before_the_service_wait_for_it(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    config = weights_config(store.url, tmp_path / "w", manifest)
    service = ServiceProcess(tmp_path / "s", config)
    used = weights_config(store.url, tmp_path / "w", manifest, service=service.socket, service_deadline_s=30.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(materialise_small_files, used)
        with service:
            assert waiting.result(30).name == manifest.weights_digest
    report = json.loads(Path(used.report).read_text()) if Path(used.report).exists() else {}
    assert report.get("service", "present") == "present"


def test_refused_release_ends_the_service_and_tells_the_waiting_worker(
    tmp_path: Path, store: StandIn, manifest: Manifest
) -> None:
    wrong = manifest.model_copy(update={"version": "2"})
    config = weights_config(store.url, tmp_path / "w", wrong)
    service = ServiceProcess(tmp_path / "s", config)
    used = weights_config(store.url, tmp_path / "w", wrong, service=service.socket, service_deadline_s=30.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(materialise_small_files, used)
        service.start(wait_s=0)
        assert service.process is not None and service.process.wait(30) == 1
        with pytest.raises(DynamoBlobError) as e:
            waiting.result(30)
    assert e.value.code == "REGISTRY-RELEASE-MISSING" and "/1/" not in e.value.where
    assert "REGISTRY-RELEASE-MISSING" in service.log.read_text() and "Traceback" not in service.log.read_text()
    assert json.loads(Path(used.report).read_text())["error"]["code"] == "REGISTRY-RELEASE-MISSING"


def test_the_service_pins_only_what_the_plan_names(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    """A service with another plan cannot make a worker take another manifest."""
    other = make_release(tmp_path / "store", tmp_path / "model", version="9", range_bytes=MiB)
    with ServiceProcess(tmp_path / "s", weights_config(store.url, tmp_path / "w", other)) as service:
        used = weights_config(store.url, tmp_path / "w", manifest, service=service.socket)
        with pytest.raises(DynamoBlobError) as e:
            materialise_small_files(used)
    assert e.value.code == "WEIGHTS-MANIFEST-MISMATCH" and e.value.data["found"] == other.digest()


def test_what_arrives_for_an_entry_that_failed_meanwhile_is_not_kept(tmp_path: Path, manifest: Manifest) -> None:
    """Else its range would count as ready, and a peer be offered a page that nobody wrote."""
    file = next(f for f in manifest.files if f.path.endswith(".safetensors"))
    cache = NodeCache(tmp_path / "cache", 64 * MiB)
    entry, work = cache.lease(file)
    assert work and cache.write(entry, 0, memoryview(b"1234"))
    cache.failed(entry, DynamoBlobError("WEIGHTS-FILL", "no more"))
    assert not cache.write(entry, 4, memoryview(b"5678"))
    cache.reserve(entry)
    assert not any(entry.ready) and not entry.reserved
    assert list((tmp_path / "cache/partial").iterdir()) == [] and cache.entry(file.blake3) is None
    cache.close()


def test_the_next_file_is_begun_while_one_is_leased_where_it_fits_without_evicting(
    tmp_path: Path, store: StandIn
) -> None:
    random_model(tmp_path / "m3", [tensors_of(seed, [900_000]) for seed in (1, 2, 3)])
    manifest = make_release(tmp_path / "store", tmp_path / "m3", model="three", range_bytes=MiB)
    config = weights_config(store.url, tmp_path / "w", manifest)
    first, second, third = [f for f in manifest.files if f.path.endswith(".safetensors")]
    total = sum(f.size for f in (first, second, third))
    for name, budget, begun in (("wide", total, 2), ("narrow", first.size + second.size - 1, 1)):
        with ServiceProcess(
            tmp_path / name, config, cache_dir=str(tmp_path / f"c-{name}"), cache_bytes=budget
        ) as service:
            held = lease(service.client, first)
            wait_for(lambda n=begun, s=service: s.status()["cache"]["present"] == n, 30, f"{begun} files")
            assert service.status()["cache"]["entries"] == begun, "one ahead, no more"
            assert service.status()["cache"]["refused"] == 0
            del held
