"""Fills and checks cache entries: worker threads, one range at a time, peers before Blob."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.loading.config import WeightsConfig
from components.common.loading.fetch import Fetcher, Stopped, mismatch
from components.common.loading.inflight import InFlight
from components.common.loading.memory import BufferPool
from components.common.loading.pages import populate
from components.common.loading.plan import RangeJob, Segment
from components.common.loading.report import Report
from components.common.registry.manifest import FileEntry
from components.common.storage.ranges import RangeReader
from components.weights.cache import NodeCache
from components.weights.entry import Entry

log = logging.getLogger("dynamo_blob.weights")


_STOP_S = 2.0
_FILES_AHEAD = 2  # files that get their pages at a time: the one being read and the next


class _NotKept(Exception):
    """The entry failed meanwhile."""


class RangePeers(Protocol):
    """Other weight services, asked before Blob."""

    def fetch(
        self, file: FileEntry, index: int, keep: Callable[[memoryview], memoryview], give_up: Callable[[], bool]
    ) -> bool:
        """Have `keep` take the range, and verify what it kept; False if no peer had it in time. Bounded; ends soon after `give_up()`."""
        ...

    def order(self, file: FileEntry, ranges: list[int]) -> list[int]: ...

    def done(self, digest: str, index: int) -> None: ...


class Filler:
    """Ranges are worked on in the order of `fill`; an entry fails as a whole with the first range that cannot be had."""

    def __init__(
        self, cache: NodeCache, reader: RangeReader, weights: WeightsConfig, range_bytes: int, report: Report
    ) -> None:
        self.cache, self.weights, self.range_bytes, self.report = cache, weights, range_bytes, report
        self.reader = reader
        self._buffers = BufferPool(weights.range_in_flight * range_bytes)  # received and checked here, then written
        self.peers: RangePeers | None = None
        self.gate = InFlight(weights.range_in_flight)
        self._urgent: set[tuple[str, int]] = set()
        self._jobs: queue.SimpleQueue[tuple[Entry, int] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._busy: dict[tuple[str, int], threading.Lock] = {}
        self._lock = threading.Lock()
        self._new: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"fill-{i}", daemon=True) for i in range(weights.range_in_flight)
        ]
        self._threads += [
            threading.Thread(target=self._reserve, name=f"fill-pages-{i}", daemon=True) for i in range(_FILES_AHEAD)
        ]
        for thread in self._threads:
            thread.start()

    def fill(self, entry: Entry, ranges: list[int]) -> None:
        """Have `ranges` filled or checked. The file's pages are reserved meanwhile, by threads for that alone: those of
        the file ahead are there when its turn comes, for until then no worker may map it."""
        if ranges and not entry.reserved and entry.writer is not None:
            entry.writer.expect_pages()
            self._new.put(entry)
        for index in self.peers.order(entry.file, ranges) if self.peers else ranges:
            self._jobs.put((entry, index))

    def now(self, entry: Entry, index: int) -> None:
        """Have this range by the caller's own thread, straight from Blob (a peer waits for it). Raises what the fetch raises."""
        self._range(entry, index, peers=False)

    def close(self) -> None:
        self._stop.set()
        for _ in self._threads:
            self._jobs.put(None)
            self._new.put(None)
        end = time.monotonic() + _STOP_S
        for thread in self._threads:  # daemons: one that waits for a peer does not hold up the exit
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while not self._stop.is_set():
            job = self._jobs.get()
            if job is None or not self.gate.enter(self._stop.is_set):
                return
            entry, index = job
            done = 0
            try:
                done = self._range(entry, index, peers=True)
            except Stopped:
                return
            except Exception as e:
                self._failed(entry, e)
            finally:
                self.gate.leave(done)

    def _reserve(self) -> None:
        while not self._stop.is_set() and (entry := self._new.get()) is not None:
            began = time.perf_counter()
            try:
                self.cache.reserve(entry, self._stop.is_set)
            except Exception as e:
                self._failed(entry, e)
            self.report.spent("reserve", began)

    def _failed(self, entry: Entry, e: Exception) -> None:
        if isinstance(e, DynamoBlobError):
            log.error("%s", e)
        else:
            log.error("filling %s failed", entry.file.path, exc_info=e)
            why = f"{type(e).__name__}: {e}"
            e = DynamoBlobError("WEIGHTS-FILL", "the node cache could not be filled", where=entry.file.path, why=why)
        self.cache.failed(entry, e)

    def _range(self, entry: Entry, index: int, peers: bool) -> int:
        """One range, by one thread at a time; bytes gained (0 if another thread had it meanwhile)."""
        key = (entry.path.name, index)
        with self._lock:
            mine = self._busy.setdefault(key, threading.Lock())
        if not peers and mine.locked():
            self._urgent.add(key)  # whoever waits for peers gives up and asks Blob
        with mine:
            if entry.ready[index] or entry.state == "failed":
                return 0
            begin = index * self.range_bytes
            count = min(entry.file.size, begin + self.range_bytes) - begin
            if entry.state == "checking":
                self._check(entry, index, begin, entry.array[begin : begin + count].data)
                self.cache.verified(entry, index)
            else:
                try:
                    kept = peers and self._from_peer(entry, index, begin, count, key)
                    if kept or (entry.error is None and self._from_blob(entry, index, begin, count)):
                        self.cache.verified(entry, index)
                finally:
                    if self.peers is not None:
                        self.peers.done(entry.file.blake3, index)
            with self._lock:
                self._busy.pop(key, None)
                self._urgent.discard(key)
            return count

    def _check(self, entry: Entry, index: int, begin: int, view: memoryview) -> None:
        found = blake3(view).hexdigest()
        if found != entry.file.ranges[index]:
            self.report.add("cache_altered")
            raise mismatch(
                entry.file.path, index, begin, begin + len(view), entry.file.ranges[index], found, str(entry.path)
            )
        self.report.fetched("cache_checked", len(view))

    def _from_peer(self, entry: Entry, index: int, begin: int, count: int, key: tuple[str, int]) -> bool:
        """Straight from the landing slot into the file and verified there: nobody reads a range before it is announced."""

        def keep(landed: memoryview) -> memoryview:
            if not self.cache.write(entry, begin, landed, self._stop.is_set):
                raise _NotKept
            kept = entry.array[begin : begin + count].data
            populate(kept)
            return kept

        if self.peers is None:
            return False
        try:
            return self.peers.fetch(entry.file, index, keep, lambda: key in self._urgent or self._stop.is_set())
        except _NotKept:
            return False

    def _from_blob(self, entry: Entry, index: int, begin: int, count: int) -> bool:
        w, view = self.weights, self._buffers.lend(self.range_bytes)[:count].data
        fetcher = Fetcher(
            self.reader, w.release.container, self.report, retries=w.range_retries, range_s=w.range_deadline_s,
            deadline=time.monotonic() + min(w.deadline_s, (w.range_retries + 1) * w.range_deadline_s), gate=self.gate, stopped=self._stop.is_set,
        )  # fmt: skip
        job = RangeJob(entry.file, index, begin, begin + count, entry.file.ranges[index], Segment(entry.file, 0, 0, []))
        began = time.perf_counter()
        fetcher.fetch(job, view)
        self.report.spent("fetch", began)
        began = time.perf_counter()
        try:
            return self.cache.write(entry, begin, view, self._stop.is_set)
        finally:
            self.report.spent("keep", began)
