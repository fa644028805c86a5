"""A store that answers with the previous version: a clear refusal or a verified load, never old bytes as the new version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bench.standin import StandIn
from components.common.errors import DynamoBlobError
from components.common.loading.config import WeightsConfig
from components.common.loading.report import Report
from components.common.loading.session import open_session
from components.common.registry.config import ReleaseConfig
from components.common.registry.manifest import FileEntry, Manifest
from tests.faults.proxy import FaultProxy, Rule
from tests.faults.releases import MiB, digests, make_release, random_model, tensors_of, weights_config
from tests.faults.services import ServiceThread

SIZES = [700_000, 3, 900_000]


def shard(seed: int) -> dict[str, torch.Tensor]:
    """Both versions have the same names and sizes: nothing but the bytes tells them apart."""
    return {f"w{i}": t for i, t in enumerate(tensors_of(seed, SIZES).values())}


OLD, NEW = digests(shard(1)), digests(shard(2))


class Versions(NamedTuple):
    root: Path
    old: Manifest
    new: Manifest


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    root = tmp_path_factory.mktemp("versions")
    made = []
    for version, seed in (("1", 1), ("2", 2)):
        random_model(root / f"model-{version}", [shard(seed)])
        made.append(make_release(root / "store", root / f"model-{version}", version=version, range_bytes=MiB // 4))
    return Versions(root / "store", *made)


@pytest.fixture
def proxy(versions: Versions) -> Iterator[FaultProxy]:
    server = StandIn(versions.root).start()
    with FaultProxy("127.0.0.1", server.port) as p:
        yield p
    server.close()


def weights(manifest: Manifest) -> FileEntry:
    return next(f for f in manifest.files if f.path.endswith(".safetensors"))


def old_object(versions: Versions, times: int = -1) -> Rule:
    """The old weights under the new ones' name."""
    old, new = weights(versions.old), weights(versions.new)
    assert old.path == new.path and old.size == new.size and old.blake3 != new.blake3
    return Rule("other", f"GET .*/{new.blob}", target=f"/standin/weights/{old.blob}", times=times)


def old_document(name: str) -> Rule:
    return Rule("other", f"GET .*/releases/m/2/{name}", target=f"/standin/weights/releases/m/1/{name}")


def load(config: WeightsConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """Digests of all tensors that were handed over, and the report."""
    report = Report()
    with open_session(config, None, report) as session:
        return digests(dict(session.tensors())), report.as_json()


@pytest.mark.parametrize("through", ["blob", "service"])
def test_old_weights_under_the_new_name_are_refused(
    proxy: FaultProxy, tmp_path: Path, versions: Versions, through: str
) -> None:
    url, given = proxy.url("standin"), dict[str, torch.Tensor]()
    proxy.rules = [old_object(versions)]
    cache = {"cache_dir": str(tmp_path / "cache"), "cache_bytes": 16 * MiB}
    with ServiceThread(tmp_path / "s", weights_config(url, tmp_path / "ws", versions.new), **cache) as service:
        socket = service.socket if through == "service" else ""
        config = weights_config(url, tmp_path / "w", versions.new, service=socket)
        with pytest.raises(DynamoBlobError) as e, open_session(config, None, Report()) as session:
            for name, tensor in session.tensors():
                given[name] = tensor
        old, new = weights(versions.old), weights(versions.new)
        assert e.value.code == "WEIGHTS-DIGEST-MISMATCH" and not given
        i = e.value.data["range"]
        assert (e.value.data["expected"], e.value.data["found"]) == (new.ranges[i], old.ranges[i]), (
            "it says whose they are"
        )
        assert list((tmp_path / "cache/objects").iterdir()) == []
        assert load(weights_config(url, tmp_path / "w1", versions.old))[0] == OLD, "they are right under their own name"
        proxy.rules = []
        assert load(config)[0] == NEW, "and the new ones are, once the store gives them"


def test_old_weights_once_are_read_again(proxy: FaultProxy, tmp_path: Path, versions: Versions) -> None:
    proxy.rules = [old_object(versions, times=1)]
    found, report = load(weights_config(proxy.url("standin"), tmp_path / "w", versions.new))
    assert found == NEW
    assert report["digest_mismatches"] == report["retries"] == proxy.faults["other"] == 1


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "by_name"])
@pytest.mark.parametrize(
    ("names", "code"),
    [
        (("manifest.json",), "REGISTRY-MANIFEST-MISMATCH"),
        (("manifest.sig",), "REGISTRY-SIGNATURE-MISMATCH"),
        (("manifest.json", "manifest.sig"), "REGISTRY-SIGNATURE-MISMATCH"),
    ],
    ids=["manifest", "signature", "both"],
)
def test_an_old_manifest_under_the_new_version_is_refused(
    proxy: FaultProxy, tmp_path: Path, versions: Versions, names: tuple[str, ...], code: str, pinned: bool
) -> None:
    """Each half is whole and of a real release: only that it is of another one tells."""
    config = weights_config(proxy.url("standin"), tmp_path / "w", versions.new)
    if not pinned:
        config = config.model_copy(update={"release": ReleaseConfig(model="m", version="2")})
    proxy.rules = [old_document(name) for name in names]
    with pytest.raises(DynamoBlobError) as e:
        load(config)
    assert e.value.code == code and "/releases/m/2/" in e.value.where and e.value.why and e.value.do
    assert not any("/objects/" in entry["target"] for entry in proxy.entries), "no byte of either version was read"
    assert proxy.faults["other"] >= 1
    proxy.rules = []
    assert load(config)[0] == NEW
