"""Case 14 (LMCache#4385): concurrent requests with equal prefixes never get each other's chunks."""

from __future__ import annotations

import time

from tests.kvtools.fixtures import names, stored
from tests.kvtools.manager import data


def test_concurrent_prefixes_get_their_own_rows(make) -> None:
    writer, reader = make(), make()
    prompts = {t: [*names(3, "shared"), *names(3, f"own-{t}-")] for t in range(6)}
    for chunks in prompts.values():
        stored(writer, chunks)
    requests = {t: reader.request(chunks=c) for t, c in prompts.items()}
    end = time.monotonic() + 30
    while None in (answers := {t: reader.scan(requests[t], prompts[t]) for t in prompts}).values():
        assert time.monotonic() < end, answers
        reader.step()
        time.sleep(0.001)
    assert answers == {t: 6 for t in prompts}
    for t, chunks in prompts.items():
        assert reader.rows(requests[t], chunks) == [data(c) for c in chunks]


def test_tenants_do_not_share_a_name(make) -> None:
    """Even a colliding key is another object: the tenant is part of the name and of the header."""
    writer, reader = make(), make()
    stored(writer, names(3), tenant="1" * 32)
    other = reader.request(tenant="2" * 32, chunks=names(3))
    assert reader.hit(other, names(3)) == 0
    own = reader.request(tenant="1" * 32, chunks=names(3))
    assert reader.hit(own, names(3)) == 3
