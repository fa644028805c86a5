"""Memory over requests with aborts, in small (`dynamo bench soak` is the 20,000): nothing grows, nothing stays behind."""

from __future__ import annotations

import pytest

from bench.mockgraph import MockGraph
from bench.soak import growth, leftovers, soak


@pytest.mark.slow
async def test_nothing_grows_and_nothing_is_left_behind(graph: MockGraph) -> None:
    import asyncio

    samples, outcomes = await soak(graph, 1600, seed=3)
    assert not outcomes["bad"] and outcomes["aborted"] > 50, outcomes
    assert not any((await asyncio.to_thread(leftovers, graph)).values())
    grown = growth(samples)
    assert grown["gateway"] < 25 and grown["router"] < 25, grown
