"""TieringOffloadingSpec for every platform: vLLM's own worker on CUDA, `HostCopyWorker` on the CPU platform."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from components.common.kv import observed
from components.common.kv.hostcopy import HostCopyWorker


class HostTieringSpec(TieringOffloadingSpec):
    _host_worker: HostCopyWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().build_metric_definitions(extra_config), **observed.definitions()}

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._host_worker is None:
            parallel = self.config.parallel
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=parallel.rank % parallel.world_size,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._host_worker = HostCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._host_worker
