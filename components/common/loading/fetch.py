"""One range from somewhere, verified: sources in order, a retry budget, a deadline.

Contract of `Fetcher.fetch`: when it returns, `view` holds bytes whose digest is the manifest's. Otherwise
it raises. No other origin than the manifest's own blob is ever asked.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext

from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.loading.inflight import InFlight
from components.common.loading.mapped import MappedFile
from components.common.loading.pages import populate
from components.common.loading.plan import RangeJob
from components.common.loading.ranks import SharedFile
from components.common.loading.report import Report
from components.common.storage.errors import StorageError
from components.common.storage.ranges import RangeReader

_BACKOFF_S = 0.2
_BACKOFF_MOST_S = 5.0


class Stopped(Exception):
    """The load was given up for another reason."""


def mismatch(
    job_file: str, index: int, begin: int, end: int, expected: str, found: str, source: str
) -> DynamoBlobError:
    return DynamoBlobError(
        "WEIGHTS-DIGEST-MISMATCH", "weight bytes are not those of the release", where=f"{job_file} bytes {begin}-{end - 1} (range {index}) from {source}",
        why=f"expected blake3 {expected}, found {found}",
        do="the stored object was changed or damaged: run `dynamo release verify`, then publish again under a new version",
        file=job_file, range=index, begin=begin, end=end, expected=expected, found=found, source=source,
    )  # fmt: skip


class Fetcher:
    """Reads ranges from Blob.

    retries      tries beyond the first, per range.
    range_s      seconds one try may take; `deadline` (time.monotonic()) ends everything.
    verify       False only in benchmarks, to measure what verification costs.
    """

    def __init__(
        self, reader: RangeReader, container: str, report: Report, *, retries: int, range_s: float, deadline: float,
        gate: InFlight | None = None, stopped: Callable[[], bool] = lambda: False, verify: bool = True, seed: int | None = None,
    ) -> None:  # fmt: skip
        self.reader, self.container, self.report = reader, container, report
        self.retries, self.range_s, self.deadline = retries, range_s, deadline
        self.gate, self.stopped, self.verify = gate, stopped, verify
        self._random = random.Random(seed)

    def fetch(self, job: RangeJob, view: memoryview, mapped: MappedFile | SharedFile | None = None) -> None:
        """`mapped`: the node cache's file that `view` lies in; the range is taken from there if it is right."""
        error = None
        if isinstance(mapped, SharedFile):
            return self._shared(job, view, mapped)
        if mapped is not None:
            error = self._from_cache(job, view, mapped)
            if error is None:
                return
        try:
            self._with_retries(job, view)
        except StorageError as e:
            if error is not None and e.code != "STORAGE-NOT-FOUND":
                raise error from e  # the cache was wrong or lost, and the store does not answer
            raise

    def _shared(self, job: RangeJob, view: memoryview, shared: SharedFile) -> None:
        if shared.mine(job.index):
            try:
                self._with_retries(job, view)
            except BaseException:
                shared.failed(job.index)
                raise
            shared.verified(job.index)
        elif shared.wait(job.index, self.deadline, self.stopped):
            self.report.fetched("rank", len(view))
        elif self.stopped():
            raise Stopped
        else:
            raise DynamoBlobError(
                "WEIGHTS-DEADLINE",
                "another rank of this worker did not deliver in time",
                where=job.file.path,
                why=f"range {job.index}",
                do="see that rank's error",
            )

    def _from_cache(self, job: RangeJob, view: memoryview, mapped: MappedFile) -> DynamoBlobError | None:
        if not mapped.wait(job.index, self.deadline, self.stopped):
            if self.stopped():
                raise Stopped
            self.report.add("cache_lost_ranges")
            return DynamoBlobError(
                "WEIGHTS-CACHE-LOST",
                "the node cache did not deliver",
                where=job.file.path,
                why=mapped.lost or "deadline",
            )
        if mapped.lot is not None:
            self._from_sealed(job, view, mapped.lot)
            return None
        found = blake3(view).hexdigest() if self.verify else job.digest
        if found == job.digest:
            self.report.fetched("cache", len(view))
            return None
        self.report.add("cache_mismatches")
        return mismatch(job.file.path, job.index, job.begin, job.end, job.digest, found, "the node cache")

    def _from_sealed(self, job: RangeJob, view: memoryview, lot: int) -> None:
        """Verified by the weight service, sealed by the kernel; the range drawn by lot is hashed here too."""
        populate(view)
        if job.index == lot and self.verify and (found := blake3(view).hexdigest()) != job.digest:
            self.report.add("sealed_mismatches")  # ranges handed over already are wrong as well: no way back to Blob
            raise mismatch(job.file.path, job.index, job.begin, job.end, job.digest, found, "the weight service's sealed file")  # fmt: skip
        self.report.fetched("cache", len(view))
        self.report.add("sealed_bytes", len(view))

    def _with_retries(self, job: RangeJob, view: memoryview) -> None:
        error: DynamoBlobError | None = None
        for attempt in range(self.retries + 1):
            if self.stopped():
                raise Stopped
            if error is not None:
                self.report.add("retries")
                self._pause(attempt, error)
            try:
                with self.gate.transfer(attempt > 0, self.stopped) if self.gate else nullcontext():
                    self._from_blob(job, view)
                self.report.fetched("blob", len(view))
                return
            except DynamoBlobError as e:
                error = e
                if isinstance(e, StorageError) and not self._may_pass(e):
                    break
                if e.code in _ONCE_MORE and attempt >= 1:
                    break  # read twice, wrong twice: it is stored so
            if time.monotonic() >= self.deadline:
                break
        assert error is not None
        raise error

    def _may_pass(self, e: StorageError) -> bool:
        """A name or a server that is lost while others of its answers lie here comes back, more often than not."""
        return e.retryable or e.code in _ONCE_MORE or (e.code in _LOST and self.reader.received > 0)

    def _from_blob(self, job: RangeJob, view: memoryview) -> None:
        hasher = blake3() if self.verify else None
        hashing = 0.0

        def digest(piece: memoryview) -> None:
            nonlocal hashing
            assert hasher is not None
            began = time.perf_counter()
            hasher.update(piece)
            hashing += time.perf_counter() - began

        now = time.monotonic()
        end = min(self.deadline, now + self.range_s)
        container = job.file.container or self.container
        try:
            self.reader.read_into(
                container,
                job.file.blob,
                job.begin,
                view,
                deadline=end,
                on_bytes=digest if hasher else None,
                stopped=self.stopped,
            )
        except StorageError as e:
            self.report.add(f"error.{e.code}")
            if e.code in _SLOW_DOWN and self.gate is not None and not self.stopped():
                self.gate.slower(now)
            raise
        self.report.spent_s("hash", hashing)
        if hasher is not None and (found := hasher.hexdigest()) != job.digest:
            self.report.add("digest_mismatches")
            raise mismatch(
                job.file.path,
                job.index,
                job.begin,
                job.end,
                job.digest,
                found,
                self.reader.uri(container, job.file.blob),
            )

    def _pause(self, attempt: int, error: DynamoBlobError) -> None:
        """Exponential, jittered; gives up early when the load stops."""
        wait = min(_BACKOFF_MOST_S, _BACKOFF_S * 2 ** (attempt - 1)) * (0.5 + self._random.random())
        until = min(time.monotonic() + wait, self.deadline)
        while (left := until - time.monotonic()) > 0:
            if self.stopped():
                raise Stopped
            time.sleep(min(0.1, left))


_SLOW_DOWN = {"STORAGE-THROTTLED", "STORAGE-BUSY", "STORAGE-TIMEOUT"}
_LOST = {"STORAGE-DNS", "STORAGE-REFUSED"}
# What a damaged connection or proxy may cause as well as a damaged object: asked once more, then believed.
_ONCE_MORE = {"WEIGHTS-DIGEST-MISMATCH", "STORAGE-RANGE"}
