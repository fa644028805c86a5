"""Case 24, its kind: a request whose tenant cannot be one opens nothing, stores nothing, and ends no engine."""

from __future__ import annotations

from typing import Any

import pytest

from components.common.kv.keys import PUBLIC
from tests.kvtools import kv
from tests.kvtools.fixtures import names, stored


@pytest.mark.parametrize("tenant", ["public", "A" * 32, "../" + "0" * 29, "0" * 33, 7, ["x"]], ids=str)
def test_a_tenant_that_is_none_is_nobody(make, store, container, tenant: Any) -> None:
    scheduler = make()
    chunks = names(2, "m")
    stored(scheduler, chunks, tenant=PUBLIC)
    before = kv.chunks(store, container)
    assert len(before) == 2
    scheduler.forget()
    request = scheduler.request(tenant=tenant, chunks=chunks)
    assert scheduler.hit(request, chunks) == 0, "nobody hits nothing"
    stored(scheduler, names(2, "n"), tenant=tenant)
    assert kv.chunks(store, container) == before
    assert scheduler.tier.counts["store_dropped", "tenant_invalid"] == 2
