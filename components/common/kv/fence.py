"""What a purge may ask of a worker: that no put below a generation is under way any more.

NIXL cannot take a put back, and a store or a network may hold one long past its deadline. Waiting alone proves
nothing about such a put; the worker that made it knows. So each worker has one small object,

    _control/workers/<worker>.json      {since, seen: {tenant: {generation, under_way}}}

written before its first put (a worker that cannot write it puts nothing) and again whenever it learns of a raised
generation: how many of its puts for that tenant below that generation are still on their way. What has landed
meanwhile under an old generation it deletes itself and counts until that is done. `asked` is the purge's side.

A worker that was killed leaves its object behind: it answers nothing and is `silent`. A live one writes its own again
every hour, so what nobody wrote for a day is of one that ended: the sweeper and purges delete it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from components.common.errors import DynamoBlobError
from components.common.kv.epochs import generation_of
from components.common.kv.store import WORKERS_PREFIX, KvStore

log = logging.getLogger(__name__)

_AGAIN_S = 0.5
_BEAT_S = 3600.0
SILENT_S = 86400.0
"""Seconds after which a note that nobody wrote again is of a worker that ended."""
_MOST_SEEN = 4096
"""Tenants one worker answers for; the longest raised are forgotten first (a purge then counts the worker as silent)."""


class Workers(NamedTuple):
    """Answers to one purge: names of workers; `waiting` has the puts each still has under way."""

    confirmed: list[str]
    waiting: dict[str, int]
    silent: dict[str, float]


class Fence:
    """The worker's side. `flight(container, name)` for each put; `raised` when a generation rose. Neither blocks."""

    def __init__(self, store: KvStore, worker: str) -> None:
        self._store = store
        self.name = f"{WORKERS_PREFIX}{worker}-{os.getpid()}-{int(time.time() * 1e3)}.json"
        self._since = time.time()
        self._generation: Callable[[str], int | None] = lambda _: None
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()
        self._doubtful: dict[str, str] = {}
        self._raised: dict[str, int] = {}
        self._written: dict[str, dict[str, int]] = {}
        self.registered = False
        self.deleted = self.failures = 0
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-fence", daemon=True)

    def start(self, generation: Callable[[str], int | None]) -> Fence:
        """generation(tenant): the current one, None while unknown (`Epochs.generation`)."""
        self._generation = generation
        self._thread.start()
        return self

    def register(self) -> None:
        """Make this worker known; before its first put. Raises StorageError."""
        if not self.registered:
            self._write({})
            self.registered = True

    def flight(self, container: str, name: str) -> Flight:
        return Flight(self, container, name)

    def raised(self, tenant: str, generation: int) -> None:
        with self._lock:
            self._raised.pop(tenant, None)
            self._raised[tenant] = generation
            if len(self._raised) > _MOST_SEEN:
                del self._raised[next(iter(self._raised))]
        self._wake.set()

    def turn(self, beat: bool = False) -> bool:
        """Delete what landed under an old generation, and answer. False = there is more to do. Raises StorageError.

        `beat`: answer even if nothing changed."""
        self._clear()
        with self._lock:
            names = [*self._under_way, *self._doubtful]
            seen = {t: {"generation": g, "under_way": _older(names, t, g)} for t, g in self._raised.items()}
        if beat or seen != self._written:
            self._write(seen)
            self._written = seen
        return not self._doubtful

    def close(self, drained: bool) -> None:
        """`drained`: no transfer is left. Only then this worker is forgotten; otherwise a purge shall find it silent."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10)
        try:
            if self.registered and drained and not self._under_way and self.turn():
                self._store.delete(self._store.control, [self.name])
                self.registered = False
        except DynamoBlobError as e:
            log.info("this worker's %s stays: %s", self.name, e)

    def _begin(self, name: str) -> None:
        with self._lock:
            self._under_way[name] += 1

    def _over(self, container: str, name: str) -> None:
        tenant, namespace = name.split("/", 2)[:2]
        with self._lock:
            if self._generation(tenant) != generation_of(namespace):
                self._doubtful[name] = container
            self._under_way[name] -= 1
            if self._under_way[name] <= 0:
                del self._under_way[name]
        self._wake.set()

    def _clear(self) -> None:
        for name, container in list(self._doubtful.items()):
            tenant, namespace = name.split("/", 2)[:2]
            generation = self._generation(tenant)
            if generation is None:
                continue  # not known now; no put is made meanwhile, so there are never more of these than slots
            if generation != generation_of(namespace):
                done = self._store.delete(container, [name])
                if done.failed:
                    continue
                self.deleted += len(done.deleted)
                log.info("a put landed after the purge of tenant %s; deleted: %s/%s", tenant[:8], container, name)
            with self._lock:
                self._doubtful.pop(name, None)

    def _write(self, seen: dict[str, dict[str, int]]) -> None:
        self._store.write(self.name, json.dumps({"since": self._since, "seen": seen}, sort_keys=True).encode())

    def _run(self) -> None:
        more, beat_at = False, time.monotonic() + _BEAT_S
        while not self._stop.is_set():
            self._wake.wait(_AGAIN_S if more else max(0.0, beat_at - time.monotonic()))
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                beat = time.monotonic() >= beat_at
                more = self.registered and not self.turn(beat)
                if beat:
                    beat_at = time.monotonic() + _BEAT_S
            except DynamoBlobError as e:
                more, self.failures = True, self.failures + 1
                log.debug("fence: %s", e)


class Flight:
    """One put: `begin` before the generation is looked at for the last time, `over` when its transfer really is."""

    __slots__ = ("_container", "_fence", "_name", "_open")

    def __init__(self, fence: Fence, container: str, name: str) -> None:
        self._fence, self._container, self._name, self._open = fence, container, name, False

    def begin(self) -> None:
        self._open = True
        self._fence._begin(self._name)

    def over(self) -> None:
        if self._open:
            self._open = False
            self._fence._over(self._container, self._name)


def asked(store: KvStore, tenant: str, generation: int) -> Workers:
    """What every worker says about puts of a tenant below a generation. Raises StorageError."""
    out = Workers([], {}, {})
    for info in store.list(store.control, WORKERS_PREFIX):
        worker = info.name.removeprefix(WORKERS_PREFIX).removesuffix(".json")
        raw, _ = store.read(info.name)
        if raw is None:  # ended meanwhile
            continue
        said = _said(raw, tenant)
        if said is None or said[0] < generation:
            out.silent[worker] = info.modified
        elif said[1]:
            out.waiting[worker] = said[1]
        else:
            out.confirmed.append(worker)
    return out


def forget_ended(store: KvStore, now: float, go: Callable[[], bool]) -> None:
    """Delete the notes of workers that ended. `now`: Unix seconds by the store's clock. Raises StorageError."""
    ended = [i.name for i in store.list(store.control, WORKERS_PREFIX) if now - i.modified > SILENT_S]
    store.delete(store.control, ended, go)


def _said(raw: bytes, tenant: str) -> tuple[int, int] | None:
    try:
        found: dict[str, Any] = json.loads(raw)["seen"][tenant]
        return int(found["generation"]), int(found["under_way"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _older(names: list[str], tenant: str, generation: int) -> int:
    parts = (n.split("/", 2) for n in names)
    return sum(p[0] == tenant and generation_of(p[1]) < generation for p in parts)
