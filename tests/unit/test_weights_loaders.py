"""Loaders of others: refused by the worker itself, and the whole model directory they read."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.standin import StandIn
from components.common.engine import launch, zygote
from components.common.engine.config import EngineArgs, WorkerConfig
from components.common.errors import DynamoBlobError
from components.common.loading import whole
from components.common.loading.files import materialise_small_files
from components.common.loading.whole import materialise_model, model_directory
from components.common.registry.manifest import Manifest
from tests.faults import stores
from tests.faults.releases import MiB, make_release, random_model, tensors_of, weights_config
from tests.faults.services import ServiceThread

store = stores.store


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    random_model(tmp_path / "model", [tensors_of(s, [900_000, 0, 700_000]) for s in range(3)])
    return make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB // 4)


def files_under(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("weights", "extra", "code"),
    [
        ({"loader": "auto"}, {}, "WEIGHTS-UNVERIFIED-LOADER"),
        ({"loader": "runai_streamer", "allow_unverified": True}, {}, "WEIGHTS-LOADER-MISSING"),
        ({"loader": "modelexpress", "allow_unverified": True}, {}, "WEIGHTS-LOADER-MISSING"),
        ({}, {"load_format": "auto"}, "WEIGHTS-UNVERIFIED-LOADER"),
        ({}, {"speculative_config": {"model": "someone/draft"}}, "WEIGHTS-UNVERIFIED-LOADER"),
    ],
)
def test_the_worker_itself_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, weights: dict[str, Any],
    extra: dict[str, Any], code: str,
) -> None:  # fmt: skip
    """`dynamo check` refuses most of these; a worker started past it does too, before it imports vLLM or asks anybody."""
    monkeypatch.setattr(zygote, "preload_openmp", lambda: pytest.fail("it got past the refusal"))
    config = WorkerConfig(
        name="aggregated-0", role="aggregated", served_model="m", namespace="n", component="backend", run_dir=str(tmp_path / "run"),
        weights=weights_config("http://127.0.0.1:1/nobody", tmp_path / "w", **weights), engine=EngineArgs(extra=extra),
    )  # fmt: skip
    (tmp_path / "plan.json").write_text(config.model_dump_json())
    assert launch.main("decode", ["--plan", str(tmp_path / "plan.json")]) == 1
    said = capsys.readouterr().err
    assert f"{code}:" in said and "Traceback" not in said


def test_ours_and_an_installed_loader_are_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole.check_loader(weights_config("http://127.0.0.1:1/nobody", tmp_path))
    monkeypatch.setitem(whole.PACKAGES, "runai_streamer", "json")
    whole.check_loader(
        weights_config("http://127.0.0.1:1/nobody", tmp_path, loader="runai_streamer", allow_unverified=True)
    )


def other(store: StandIn, work: Path, manifest: Manifest, **changes: Any) -> Any:
    return weights_config(store.url, work, manifest, loader="auto", allow_unverified=True, **changes)


def test_the_whole_model_is_made_once_under_its_digest(tmp_path: Path, store: StandIn, manifest: Manifest) -> None:
    configs = [other(store, tmp_path / "w", manifest, report=str(tmp_path / f"{i}.json")) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:  # four workers of a node
        paths = set(pool.map(model_directory, configs))
    path = paths.pop()
    assert not paths and path == Path(configs[0].root) / "whole" / manifest.weights_digest
    found = files_under(path)
    assert found.pop("manifest.json") == manifest.canonical()
    assert found == files_under(tmp_path / "model")
    blobs = {f"weights/{f.blob}": f.size for f in manifest.files}
    assert {k: v for k, v in store.served.items() if "objects" in k} == blobs, "one of the four read the store"
    assert [p.name for p in path.parent.iterdir() if p.is_dir()] == [path.name], "no leftovers"
    reports = [json.loads(Path(c.report).read_text()) for c in configs]
    total = sum(f.size for f in manifest.files)
    assert sorted(tuple(r["bytes_by_source"].items()) for r in reports) == [
        (("blob", total),),
        *[(("disk", total),)] * 3,
    ]
    assert all(r["complete"] and r["unverified"] and r["verified_bytes"] == r["manifest_bytes"] for r in reports)
    small = materialise_small_files(
        weights_config(store.url, tmp_path / "w", manifest)
    )  # beside it, as the gateway does
    assert small == Path(configs[0].root) / manifest.weights_digest and not list(small.glob("*.safetensors"))


@pytest.mark.parametrize("spoil", ["altered", "truncated", "added", "missing", "linked"])
def test_a_spoiled_directory_is_made_again(tmp_path: Path, store: StandIn, manifest: Manifest, spoil: str) -> None:
    config = other(store, tmp_path / "w", manifest)
    path = materialise_model(config)
    wanted, shard = files_under(path), next(path.glob("*.safetensors"))
    if spoil == "altered":
        with shard.open("r+b") as f:
            f.seek(500_000)
            f.write(b"\0\1\2\3")
    elif spoil == "truncated":
        os.truncate(shard, 1000)
    elif spoil == "added":
        (path / "model-00009-of-00003.safetensors").write_bytes(b"x")
    elif spoil == "linked":
        shard.unlink()
        shard.symlink_to("/dev/null")
    else:
        shard.unlink()
    assert materialise_model(config) == path
    assert files_under(path) == wanted
    assert [p.name for p in path.parent.iterdir() if p.is_dir()] == [path.name]


def test_a_flipped_bit_in_the_store_never_reaches_the_directory(
    tmp_path: Path, store: StandIn, manifest: Manifest
) -> None:
    last = [f for f in manifest.files if f.path.endswith(".safetensors")][-1]
    blob = tmp_path / "store/weights" / last.blob
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.unlink()
    blob.write_bytes(data)
    config = other(store, tmp_path / "w", manifest)
    with pytest.raises(DynamoBlobError) as e:
        materialise_model(config)
    assert e.value.code == "WEIGHTS-DIGEST-MISMATCH" and e.value.data["file"] == last.path
    assert not [p for p in (Path(config.root) / "whole").iterdir() if p.is_dir()]
    report = json.loads(Path(config.report).read_text())
    assert report["error"]["code"] == "WEIGHTS-DIGEST-MISMATCH" and not report["complete"]


def test_leftovers_of_a_killed_worker_go_and_a_full_disk_is_said_with_both_numbers(
    tmp_path: Path, store: StandIn, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = other(store, tmp_path / "w", manifest)
    left = Path(config.root) / "whole" / f".{manifest.weights_digest}.dead.part"
    left.mkdir(parents=True)
    (left / "model-00001-of-00003.safetensors").write_bytes(b"half")
    with monkeypatch.context() as m:
        m.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1234))
        with pytest.raises(DynamoBlobError) as e:
            materialise_model(config)
    need = sum(f.size for f in manifest.files)
    assert e.value.code == "WEIGHTS-FILES" and str(need) in e.value.why and "1234" in e.value.why
    assert not left.exists()
    assert not [k for k in store.served if "objects" in k], "refused before the first byte"
    materialise_model(config)


def test_through_the_node_cache_nothing_comes_from_blob_twice(
    tmp_path: Path, store: StandIn, manifest: Manifest
) -> None:
    plain = weights_config(store.url, tmp_path / "w", manifest)
    with ServiceThread(tmp_path / "s", plain, cache_dir=str(tmp_path / "cache"), cache_bytes=64 * MiB) as service:
        for i in range(2):  # two nodes' worth of directories
            config = other(store, tmp_path / f"w{i}", manifest, service=service.socket)
            found = files_under(materialise_model(config))
            assert {k: v for k, v in found.items() if k != "manifest.json"} == files_under(tmp_path / "model")
    weights = {f"weights/{f.blob}": f.size for f in manifest.files if f.path.endswith(".safetensors")}
    assert {k: store.served[k] for k in weights} == weights
