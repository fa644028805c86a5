"""Case 15 (LMCache#4463, dynamo#14416): layout or weights change under a persistent store: zero hits, and the reason is shown."""

from __future__ import annotations

import pytest

from tests.kvtools.fixtures import names, stored
from tests.kvtools.proxy import wait_for


def test_same_store_other_weights(make) -> None:
    stored(make(), names(4))
    other = make(weights_digest="cd" * 32)
    request = other.request(chunks=names(4))
    assert other.hit(request, names(4)) == 0
    wait_for(lambda: other.tier.status()["other_namespaces"], 10)
    (found,) = other.tier.status()["other_namespaces"]
    assert found["differs"] == {"weights_digest": {"here": "cd" * 32, "there": "ab" * 32}}


def test_same_weights_hit(make) -> None:
    stored(make(), names(4))
    again = make()
    assert again.hit(again.request(chunks=names(4)), names(4)) == 4
    assert again.tier.status()["other_namespaces"] == []


@pytest.mark.parametrize("change", ["layout", "chunk"])
def test_same_store_other_layout_or_chunk_size(make, change: str) -> None:
    writer = make()
    stored(writer, names(4))
    mine = writer.tier.namespaces[0]
    other = mine.model_copy(update={"layout": "BLHNC"} if change == "layout" else {"tokens_per_chunk": 256})
    reader = make()
    reader.tier._digests[0] = other.digest()
    assert reader.hit(reader.request(chunks=names(4)), names(4)) == 0
