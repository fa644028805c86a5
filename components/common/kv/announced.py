"""What a tier told the router that it holds: STORAGE events, each chunk once until it is retracted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from vllm.v1.kv_offload.base import Medium, OffloadingEvent, OffloadKey

_REMEMBER = 1 << 16
"""Chunks remembered as announced; the oldest are announced again when they are next seen."""


class Announced:
    """`enabled` False: the engine publishes no KV events, and nothing is kept for them. Scheduler thread only."""

    def __init__(self, enabled: bool) -> None:
        self._events: list[OffloadingEvent] | None = [] if enabled else None
        self._known: OrderedDict[OffloadKey, None] = OrderedDict()

    def stored(self, key: OffloadKey) -> None:
        if key in self._known:
            return
        self._known[key] = None
        while len(self._known) > _REMEMBER:
            self._known.popitem(last=False)
        self._add(key, removed=False)

    def gone(self, key: OffloadKey) -> None:
        if key in self._known:
            del self._known[key]
            self._add(key, removed=True)

    def take(self) -> Iterator[OffloadingEvent]:
        """Events since the last call."""
        if self._events:
            events, self._events = self._events, []
            yield from events

    def forget(self) -> None:
        """DRAM was emptied, and the router with it: what is seen next is announced again."""
        self._known.clear()

    def _add(self, key: OffloadKey, removed: bool) -> None:
        if self._events is not None:
            self._events.append(OffloadingEvent(keys=[key], medium=Medium.STORAGE, removed=removed))
