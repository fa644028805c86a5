"""Stores of the weight tests: `store = stores.store` gives a test module the fixture.

`release` and `proxy` go together: a release of two shards, and a fault proxy before the stand-in that serves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.standin import StandIn
from components.common.registry.manifest import Manifest
from tests.faults.proxy import FaultProxy
from tests.faults.releases import MiB, digests, make_release, random_model, tensors_of

SHARDS = [tensors_of(s, [700_000, 1_500_000, 3, 900_000]) for s in (1, 2)]
WANTED = digests({k: v for s in SHARDS for k, v in s.items()})
OBJECTS = r"GET .*/objects/"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StandIn]:
    """The stand-in over the test's own directory `store`."""
    server = StandIn(tmp_path / "store").start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """(store directory, manifest) of SHARDS."""
    root = tmp_path_factory.mktemp("release")
    random_model(root / "model", SHARDS)
    return root / "store", make_release(root / "store", root / "model", range_bytes=MiB // 2)


@pytest.fixture
def proxy(release: tuple[Path, Manifest]) -> Iterator[FaultProxy]:
    server = StandIn(release[0]).start()
    with FaultProxy("127.0.0.1", server.port, seed=5) as p:
        yield p
    server.close()
