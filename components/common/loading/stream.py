"""Streams the tensors of a release: ranges in parallel into bounded memory, verified, handed over in file order.

    for name, tensor in TensorStream(...): ...

Contract:

* A tensor is yielded only when every range that touches it was verified.
* Order: files by path, tensors by position. Every byte of every file is fetched and verified once, header and gaps too.
* Memory: segments in flight or not yet taken never exceed `budget` bytes. A consumer that keeps tensors keeps their
  buffers (then its own memory); no buffer is reused while anything refers to it.
* Any failure stops all readers and is raised to the consumer, by the load's deadline.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from components.common.errors import DynamoBlobError
from components.common.loading.fetch import Fetcher, Stopped
from components.common.loading.inflight import InFlight
from components.common.loading.mapped import MappedFile
from components.common.loading.memory import BufferPool
from components.common.loading.plan import (
    SEGMENT_BYTES,
    RangeJob,
    Segment,
    check_budget,
    check_index,
    plan_file,
    weight_files,
)
from components.common.loading.ranks import SharedFile
from components.common.loading.report import Report
from components.common.loading.tensors import tensor_of
from components.common.registry.manifest import FileEntry, Manifest, TensorEntry

if TYPE_CHECKING:
    import torch


class TensorStream:
    """One load. `fetcher` verifies; `gate` bounds the ranges in flight (threads: gate.most)."""

    def __init__(
        self, manifest: Manifest, fetcher: Fetcher, gate: InFlight, report: Report, *, budget: int, deadline: float,
        segment_bytes: int = SEGMENT_BYTES, pin: Callable[[int, int], Callable[[], None]] | None = None, place: Callable[[FileEntry], MappedFile | SharedFile | None] | None = None,
    ) -> None:  # fmt: skip
        check_index(manifest)
        check_budget(manifest, budget)
        self.fetcher, self.gate, self.report, self.deadline = fetcher, gate, report, deadline
        fetcher.stopped, fetcher.gate = self._stopped, gate
        self._budget, self._used = budget, 0
        self._place = place
        self._placed: dict[str, MappedFile | SharedFile | None] = {}
        self._placing: set[str] = set()
        self._pool = BufferPool(spare_bytes=budget, pin=pin)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._over = False
        self._segments: list[Segment] = []
        self._jobs: list[RangeJob] = []
        size = max(manifest.range_bytes, min(segment_bytes, budget // 4))
        by_file: dict[str, list[TensorEntry]] = {}
        for t in manifest.tensors:
            by_file.setdefault(t.file, []).append(t)
        for file in weight_files(manifest):
            segments, jobs = plan_file(file, by_file.get(file.path, []), manifest.range_bytes, size)
            self._segments += segments
            self._jobs += jobs
        for i, segment in enumerate(self._segments):
            segment.index = i
        self._memory: dict[int, np.ndarray[Any, Any]] = {}
        self._spill: dict[int, list[tuple[int, np.ndarray[Any, Any]]]] = {}
        self._allocated = 0  # segments [0, _allocated) have or had memory: strictly in order, hence no deadlock
        self._next = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        count = min(self.gate.most, max(1, len(self._jobs)))
        threads = [threading.Thread(target=self._read, name=f"weights-{i}", daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        try:
            for segment in self._segments:
                yield from self._hand_over(segment)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            for thread in threads:
                thread.join()
            self._memory.clear()
            self._pool.clear()
            self.report.most("peak_in_flight", self.gate.peak)
            self.report.most("buffers_mapped", self._pool.mapped)

    def _stopped(self) -> bool:
        return self._over or self._error is not None

    # consumer

    def _hand_over(self, segment: Segment) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        asked = time.perf_counter()
        with self._changed:
            while segment.waiting and self._error is None:
                if time.monotonic() > self.deadline:
                    raise _late(segment, self.deadline)
                self._changed.wait(0.2)
            if self._error is not None:
                raise self._error
            memory = self._memory.pop(segment.index, None)
        self.report.spent("starved", asked)
        if segment.begin == 0 and memory is not None:
            check_header(segment, memory[segment.lead :])
        if memory is not None and segment.tensors:
            whole = torch.from_numpy(memory)
            del memory
            for entry in segment.tensors:
                offset = segment.lead + entry.begin - segment.begin
                given = time.perf_counter()
                yield entry.name, tensor_of(whole, offset, entry)
                self.report.spent("placing", given)
                self.report.add("tensors")
            del whole
        else:
            for entry in segment.tensors:  # tensors without bytes, in a segment without bytes
                yield entry.name, tensor_of(torch.empty(0, dtype=torch.uint8), 0, entry)
                self.report.add("tensors")
        with self._changed:
            if self._segments[-1] is segment or self._segments[segment.index + 1].file is not segment.file:
                self._placed[segment.file.path] = None  # the lease ends with the last tensor of the mapping
            if segment.index < self._allocated and segment.end > segment.begin and not segment.mapped:
                self._used -= segment.capacity
            self._changed.notify_all()

    # readers

    def _read(self) -> None:
        try:
            while self._enter():
                done = 0
                try:
                    began = time.perf_counter()
                    job = self._take()
                    self.report.spent("memory", began)
                    if job is None:
                        return
                    view = self._view(job)
                    mapped = self._placed.get(job.file.path)
                    began = time.perf_counter()
                    self.fetcher.fetch(job, view, mapped)
                    self.report.spent("fetch", began)
                    if mapped is None and job.others:
                        began = time.perf_counter()
                        self._spread(job, view)
                        self.report.spent("spread", began)
                    done = len(view)
                    del view
                finally:
                    self.gate.leave(done)
                self._arrived(job)
        except Stopped:
            pass
        except BaseException as e:
            with self._changed:
                if self._error is None:
                    self._error = e
                self._changed.notify_all()
        finally:
            self.report.spent_s("cpu", time.thread_time())

    def _enter(self) -> bool:
        began = time.perf_counter()
        entered = self.gate.enter(self._stopped)
        self.report.spent("gate", began)
        return entered

    def _arrived(self, job: RangeJob) -> None:
        with self._changed:
            for s in (job.home, *job.others):
                s.waiting -= 1
            if not all(s.waiting for s in (job.home, *job.others)):
                self._changed.notify_all()

    def _read_sealed(self, job: RangeJob, mapped: MappedFile) -> None:
        """All of a file that is there and proven: to spread its ranges over threads costs more than they do."""
        with self._changed:
            first, last = self._next, self._next
            while last < len(self._jobs) and self._jobs[last].file is job.file:
                self._allocate(self._jobs[last].home)  # a mapping takes nothing of the budget
                last += 1
            self._next = last
            self._changed.notify_all()
        for each in self._jobs[first:last]:
            if self._stopped():
                raise Stopped
            self.fetcher.fetch(each, self._view(each), mapped)
            self._arrived(each)

    def _take(self) -> RangeJob | None:
        """The next range in order, once its home has memory; None when there is none left."""
        with self._changed:
            while True:
                if self._stopped() or self._next == len(self._jobs):
                    return None
                job = self._jobs[self._next]
                path = job.file.path
                if path not in self._placed and path not in self._placing:
                    self._placing.add(path)
                    break
                if path in self._placed and self._allocate(job.home):
                    self._next += 1
                    return job
                self._changed.wait(0.2)
        mapped = self._place(job.file) if self._place else None
        with self._changed:
            self._placed[path] = mapped
            self._changed.notify_all()
        if isinstance(mapped, MappedFile) and mapped.lot is not None:
            self._read_sealed(job, mapped)
        return self._take()

    def _allocate(self, home: Segment) -> bool:
        while self._allocated <= home.index:
            segment = self._segments[self._allocated]
            mapped = self._placed.get(segment.file.path)
            if mapped is not None:
                segment.lead, segment.mapped = segment.begin, True
                self._memory[segment.index] = mapped.array
            elif segment.end > segment.begin:
                if self._used + segment.capacity > self._budget and self._used:
                    return False
                memory = self._pool.lend(segment.capacity)
                self._used += segment.capacity
                self.report.most("peak_buffer_bytes", self._used)
                self._memory[segment.index] = memory
                for offset, data in self._spill.pop(segment.index, ()):
                    memory[offset : offset + len(data)] = data
            self._allocated += 1
        return True

    def _view(self, job: RangeJob) -> memoryview:
        begin = job.home.lead + job.begin - job.home.begin
        if begin < 0:
            raise AssertionError("a range begins before its home's buffer")
        with self._changed:
            memory = self._memory[job.home.index]
        return memory[begin : begin + job.end - job.begin].data

    def _spread(self, job: RangeJob, view: memoryview) -> None:
        """Copy the parts of a verified range that belong to other segments. By numpy: bytes() keeps every reader waiting."""
        for s in job.others:
            low, high = max(job.begin, s.begin), min(job.end, s.end)
            data = np.frombuffer(view[low - job.begin : high - job.begin], dtype=np.uint8)
            offset = s.lead + low - s.begin
            with self._changed:
                memory = self._memory.get(s.index)
            if memory is None:
                data = data.copy()  # the segment's buffer is not there yet, and ours may be taken before it is
                with self._changed:
                    memory = self._memory.get(s.index)
                    if memory is None:
                        self._spill.setdefault(s.index, []).append((offset, data))
            if memory is not None:
                memory[offset : offset + len(data)] = data


def check_header(segment: Segment, data: np.ndarray[Any, Any]) -> None:
    """The file's own header must agree with the manifest's index. Raises WEIGHTS-INDEX."""
    size = int.from_bytes(data[:8].tobytes(), "little")
    if 8 + size > segment.end:
        return  # a header larger than the first segment: the index was checked when the release was approved
    try:
        header = json.loads(data[8 : 8 + size].tobytes())
        for t in segment.tensors:
            found = header[t.name]
            wanted = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.begin - 8 - size, t.end - 8 - size]}
            if {k: found[k] for k in wanted} != wanted:
                raise ValueError(f"{t.name}: header says {found}, manifest {wanted}")
    except (ValueError, KeyError, TypeError) as e:
        raise DynamoBlobError(
            "WEIGHTS-INDEX", "the file's header and the manifest's tensor index disagree", where=segment.file.path, why=str(e)[:300], do="publish the release again",
        ) from None  # fmt: skip


def _late(segment: Segment, deadline: float) -> DynamoBlobError:
    return DynamoBlobError(
        "WEIGHTS-DEADLINE", "the weights did not arrive in time", where=segment.file.path,
        why=f"{segment.waiting} ranges of the segment at byte {segment.begin} are missing", do="see the storage errors above; raise weights.deadline_s if the link is only slow",
    )  # fmt: skip


def total_bytes(manifest: Manifest) -> int:
    return sum(f.size for f in manifest.files)
