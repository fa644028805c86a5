"""P2 when something is missing: no service, no store. Only verified bytes are ever used, and each policy does what it says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.standin import StandIn
from components.common.errors import DynamoBlobError
from components.common.loading.config import WeightsConfig
from components.common.loading.files import materialise_small_files
from components.common.loading.report import Report
from components.common.loading.session import open_session
from components.common.registry.manifest import Manifest
from tests.faults.releases import MiB, digests, make_release, random_model, tensors_of, weights_config
from tests.faults.services import ServiceThread

SHARDS = [tensors_of(s, [700_000, 3, 900_000]) for s in (1, 2)]
WANTED = digests({k: v for s in SHARDS for k, v in s.items()})


class Place:
    """A store that can go away and come back at the same address, and a node cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        random_model(root / "model", SHARDS)
        self.manifest: Manifest = make_release(root / "store", root / "model", range_bytes=MiB // 4)
        self.store = StandIn(root / "store").start()
        self.port = self.store.port

    def lose_store(self) -> None:
        self.store.close()

    def restore_store(self) -> None:
        self.store = StandIn(self.root / "store", self.port).start()

    def config(self, **changes: Any) -> WeightsConfig:
        base = weights_config(f"http://127.0.0.1:{self.port}/standin", self.root / "w", self.manifest, range_retries=1)
        account = base.account.model_copy(update={"retries": 0})
        return base.model_copy(
            update={"account": account, "service_deadline_s": 0.5, "cache_dir": str(self.root / "cache"), **changes}
        )

    def service(self, **changes: Any) -> ServiceThread:
        return ServiceThread(
            self.root / "s", self.config(**changes), cache_dir=str(self.root / "cache"), cache_bytes=64 * MiB
        )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    p = Place(tmp_path)
    yield p
    p.lose_store()


def load(config: WeightsConfig) -> dict[str, Any]:
    report = Report(config.report)
    with open_session(config, None, report) as session:
        assert digests(dict(session.tensors())) == WANTED
    return report.as_json()


def fill_cache(place: Place) -> None:
    with place.service() as service:
        load(place.config(service=service.socket))


def test_absent_service_is_counted_and_blob_read_under_the_same_manifest(place: Place) -> None:
    report = load(place.config(service=f"unix:{place.root}/nobody.sock"))
    assert (report["service"], report["service_absent"]) == ("absent", 1)
    assert set(report["bytes_by_source"]) == {"blob"}


@pytest.mark.parametrize(
    ("policy", "says"),
    [("fail", "wait would wait"), ("keep_warm_replicas", "keep serving"), ("use_cache", "node cache")],
)
def test_refused_at_once_with_the_reason(place: Place, policy: str, says: str) -> None:
    place.lose_store()
    began = time.monotonic()
    with pytest.raises(DynamoBlobError) as e:
        load(place.config(on_outage=policy))
    assert e.value.code == "WEIGHTS-OUTAGE" and e.value.data["on_outage"] == policy and says in str(e.value)
    assert "STORAGE-REFUSED" in e.value.why
    assert time.monotonic() - began < 10


def test_wait_waits_for_the_store_and_no_longer_than_the_deadline(place: Place) -> None:
    place.lose_store()
    timer = threading.Timer(1.5, place.restore_store)
    timer.start()
    assert load(place.config(on_outage="wait", deadline_s=30.0))["outages"] >= 1
    timer.join()
    place.lose_store()
    began = time.monotonic()
    with pytest.raises(DynamoBlobError, match="WEIGHTS-OUTAGE"):
        load(place.config(on_outage="wait", deadline_s=2.0))
    assert 1.5 < time.monotonic() - began < 10


def test_use_cache_serves_the_pinned_release_from_verified_files_alone(place: Place) -> None:
    fill_cache(place)
    small = materialise_small_files(place.config())
    place.lose_store()
    report = load(place.config(on_outage="use_cache"))
    assert report["offline"] and set(report["bytes_by_source"]) == {"cache"}
    assert materialise_small_files(place.config(on_outage="use_cache")) == small
    with place.service(on_outage="use_cache") as service:  # the service itself starts from its cache too
        assert service.client.release().resolved_from == "cache"
        assert set(load(place.config(service=service.socket))["bytes_by_source"]) == {"cache"}


@pytest.mark.parametrize("spoil", ["altered", "truncated", "missing"])
def test_use_cache_never_uses_what_is_wrong(place: Place, spoil: str) -> None:
    fill_cache(place)
    place.lose_store()
    path = sorted((place.root / "cache/objects").iterdir())[0]
    os.chmod(path, 0o644)
    if spoil == "altered":
        with path.open("r+b") as f:
            f.seek(400_000)
            f.write(b"\xff\x00\xff")
    elif spoil == "truncated":
        os.truncate(path, 1000)
    else:
        path.unlink()
    with pytest.raises(DynamoBlobError) as e:
        load(place.config(on_outage="use_cache"))
    assert e.value.code in ("WEIGHTS-DIGEST-MISMATCH", "WEIGHTS-CACHE-ENTRY")


def test_use_cache_needs_a_pinned_digest(place: Place) -> None:
    fill_cache(place)
    place.lose_store()
    config = place.config(on_outage="use_cache")
    unpinned = config.model_copy(update={"release": config.release.model_copy(update={"manifest_digest": ""})})
    with pytest.raises(DynamoBlobError) as e:
        load(unpinned)
    assert e.value.code == "WEIGHTS-OUTAGE" and "pins no manifest" in e.value.why
    for manifest in (place.root / "cache/manifests").iterdir():  # nor does another manifest do under the pinned name
        os.chmod(manifest, 0o644)
        manifest.write_bytes(manifest.read_bytes().replace(b'"version":"1"', b'"version":"2"'))
    with pytest.raises(DynamoBlobError, match="WEIGHTS-OUTAGE"):
        load(config)
