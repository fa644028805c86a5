"""Fixtures of the tests at the level of vLLM's tiering manager: a store, a fault proxy before it, a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.kvtools import kv
from tests.kvtools.azure import Store, free_port, new_container, shared
from tests.kvtools.proxy import FaultProxy

MakeScheduler = Callable[..., Any]


@pytest.fixture
def store() -> Store:
    return shared()


@pytest.fixture
def proxy(store: Store) -> Iterator[FaultProxy]:
    with FaultProxy(store.port, free_port()) as proxy:
        yield proxy
        proxy.heal()


@pytest.fixture
def container(store: Store) -> str:
    return new_container(store)


@pytest.fixture
def make(store: Store, proxy: FaultProxy, container: str) -> Iterator[MakeScheduler]:
    """make(rows=64, **settings) -> Scheduler whose Blob tier goes through the proxy."""
    from tests.kvtools.manager import Scheduler

    with ExitStack() as stack:

        def new(rows: int = 64, **more: Any) -> Scheduler:
            config = kv.settings(store, port=proxy.port, **{"container": container, "staging_bytes": 1 << 20, **more})
            scheduler = stack.enter_context(Scheduler(config, rows))
            from tests.kvtools.proxy import wait_for

            opened = scheduler.tier._opened
            wait_for(lambda: opened.scope("0" * 32, "0" * 32) is not None, 20, "purge generations are read")
            wait_for(lambda: opened.stats()["lanes"] >= 1, 60, "the back end is open")
            return scheduler

        yield new
        proxy.heal()


def names(n: int, prefix: str = "c") -> list[str]:
    return [f"{prefix}{i}" for i in range(n)]


def stored(scheduler: Any, chunks: list[str], **request: Any) -> None:
    """Compute and store `chunks`, wait until they are visible."""
    context = scheduler.request(chunks=chunks, **request)
    scheduler.hit(context, chunks)
    scheduler.put(context, chunks)
    scheduler.finish(context)
    scheduler.settle()
