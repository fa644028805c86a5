"""One load of one release by one worker: resolve, verify the small files, stream the tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.errors import DynamoBlobError
from components.common.loading.client import ServiceGone
from components.common.loading.config import WeightsConfig
from components.common.loading.cuda import PINNED_BYTES
from components.common.loading.fetch import Fetcher
from components.common.loading.files import verify_small_files
from components.common.loading.inflight import InFlight
from components.common.loading.mapped import MappedFile, lease, local, take_sealed
from components.common.loading.plan import weight_files
from components.common.loading.ranks import Ranks, SharedFile, check_shared_budget, sweep
from components.common.loading.report import Report
from components.common.loading.resolve import Found, resolve
from components.common.loading.stream import TensorStream, total_bytes
from components.common.registry.manifest import FileEntry, Manifest

if TYPE_CHECKING:
    import torch


log = logging.getLogger("dynamo_blob.weights")


class Session:
    """`tensors()` may be called once."""

    def __init__(
        self, config: WeightsConfig, resolved: Found, report: Report, *, verify: bool = True, ranks: Ranks | None = None
    ) -> None:
        self.config, self.resolved, self.report, self._verify = config, resolved, report, verify
        self._service_lost = False
        self._ranks = ranks
        self._deadline = time.monotonic() + config.deadline_s

    @property
    def manifest(self) -> Manifest:
        return self.resolved.manifest

    def tensors(
        self, pin: Callable[[int, int], Callable[[], None]] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.config
        deadline = self._deadline
        gate = InFlight(c.range_in_flight)
        fetcher = Fetcher(
            self.resolved.reader, c.release.container, self.report, retries=c.range_retries, range_s=c.range_deadline_s,
            deadline=deadline, verify=self._verify,
        )  # fmt: skip
        yield from TensorStream(
            self.manifest,
            fetcher,
            gate,
            self.report,
            budget=c.budget_bytes if pin is None else min(c.budget_bytes, max(PINNED_BYTES, 4 * self._largest())),
            deadline=deadline,
            pin=pin,
            place=self.place,
        )

    def _largest(self) -> int:
        return max((t.end - t.begin for t in self.manifest.tensors), default=0) + 2 * self.manifest.range_bytes

    def place(self, file: FileEntry) -> MappedFile | SharedFile | None:
        """The file in the node cache, filled there once for all workers of the node; None = read Blob into own buffers."""
        found = self.resolved
        if found.offline:
            return local(self.config.cache_dir, file)
        if found.service is None or self._service_lost:
            return self._share(file)
        try:
            if (sealed := take_sealed(found.service, file, self.config.sealed_uid)) is not None:
                return sealed
        except DynamoBlobError as e:
            self.report.add("sealed_refused")
            log.warning("%s", str(e))  # an error in a log record would keep the whole load alive
        try:
            return lease(found.service, file)
        except ServiceGone as e:
            self._service_lost = True
            self.report.set(service="lost", service_error=str(e))
            self.report.add("service_lost")
        except DynamoBlobError as e:
            self.report.add(f"lease.{e.code}")
        return self._share(file)

    def _share(self, file: FileEntry) -> SharedFile | None:
        return SharedFile(file, self._ranks, self._deadline) if self._ranks else None


@contextmanager
def open_session(
    config: WeightsConfig, model_path: Path | None, report: Report, *, verify: bool = True, ranks: Ranks | None = None
) -> Iterator[Session]:
    """Resolve the release and verify the small files in `model_path` (None = no directory to verify)."""
    resolved = resolve(config, report)
    try:
        report.set(
            manifest_bytes=total_bytes(resolved.manifest),
            manifest_digest=resolved.manifest.digest(),
            weights_digest=resolved.manifest.weights_digest,
        )
        if model_path is not None:
            report.fetched("local_small_files", verify_small_files(model_path, resolved.manifest))
        if ranks is not None:
            check_shared_budget(weight_files(resolved.manifest), ranks, config.budget_bytes)
        yield Session(config, resolved, report, verify=verify, ranks=ranks)
    finally:
        if ranks is not None:
            sweep(ranks.directory, ranks.session)
        resolved.reader.close()
