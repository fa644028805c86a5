"""A mock graph to break: two of each but the router and the gateway; slow enough that streams are in flight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.mockgraph import MockGraph


@pytest.fixture(scope="package")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockGraph]:
    with MockGraph(
        tmp_path_factory.mktemp("broken"),
        prefill=2,
        decode=2,
        token_ms=25.0,
        frontends=2,
        gateway={"canary_after_s": 3},
    ) as g:
        yield g
