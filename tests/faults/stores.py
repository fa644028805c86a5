"""The store of the weight tests: `store = stores.store` gives a test module the fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.standin import StandIn


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StandIn]:
    """The stand-in over the test's own directory `store`."""
    server = StandIn(tmp_path / "store").start()
    yield server
    server.close()
