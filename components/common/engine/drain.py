"""Requests in flight, and how a worker lets go of them on shutdown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager


class InFlight:
    """Counts requests; on drain waits for them up to a deadline, then aborts the rest.

    An aborted request's generator raises EngineShutdown (see `VllmEngine.generate`), which makes
    Dynamo's frontend migrate it to another worker.
    """

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        self.last_end = time.monotonic()

    def __len__(self) -> int:
        return len(self._ids)

    @contextmanager
    def track(self, request_id: str) -> Iterator[None]:
        self._ids.add(request_id)
        self._empty.clear()
        try:
            yield
        finally:
            self._ids.discard(request_id)
            self.last_end = time.monotonic()
            if not self._ids:
                self._empty.set()

    async def drain(self, deadline_s: float, abort: Callable[[str], Awaitable[None]]) -> int:
        """Wait, then abort what is left. Returns how many had to be aborted."""
        try:
            await asyncio.wait_for(self._empty.wait(), deadline_s)
            return 0
        except TimeoutError:
            pass
        self.draining = True
        left = list(self._ids)
        for request_id in left:
            await abort(request_id)
        try:
            await asyncio.wait_for(self._empty.wait(), 5.0)
        except TimeoutError:
            self._ids.clear()
        return len(left)
