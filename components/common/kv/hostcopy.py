"""HBM <-> DRAM copies on the CPU platform, where "HBM" is host memory too.

vLLM's own worker needs CUDA streams. This one copies pages on one thread, in order of submission.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

log = logging.getLogger(__name__)


class HostCopyWorker(OffloadingWorker):
    """`region` holds this worker's rows: for each chunk, all tensors' pages of its blocks, tensor after tensor."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region: SharedOffloadRegion | None = region
        pages = [(t.tensor.view(torch.int8), t.page_size_bytes) for t in kv_caches.tensors]
        self._device = [tensor.view(-1, size).numpy() for tensor, size in pages]
        self._host = [region.create_next_worker_view(size * blocks_per_chunk).numpy() for _, size in pages]
        self._used = [_used(refs) for refs in kv_caches.group_data_refs]
        self._queue: queue.SimpleQueue[tuple[int, GPULoadStoreSpec, Any, bool] | None] = queue.SimpleQueue()
        self._done: deque[TransferResult] = deque()
        self._over: dict[int, threading.Event] = {}
        self._thread = threading.Thread(target=self._run, name="kv-host-copy", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, dst_spec, src_spec, False)

    def get_finished(self) -> list[TransferResult]:
        out = []
        while self._done:
            out.append(self._done.popleft())
            self._over.pop(out[-1].job_id, None)
        return out

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            over = self._over.get(job_id)
            if over is not None:
                over.wait()

    def shutdown(self) -> None:
        if self._region is None:
            return
        self._queue.put(None)
        self._thread.join()
        self._host.clear()  # views first: the region cannot be unmapped under them
        self._region.cleanup()
        self._region = None

    def _submit(self, job_id: int, device: GPULoadStoreSpec, host: Any, store: bool) -> bool:
        self._over[job_id] = threading.Event()
        self._queue.put((job_id, device, host, store))
        return True

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job_id, device, host, store = job
            began = time.perf_counter()
            try:
                nbytes, good = self._copy(device, host, store), True
            except Exception:  # vLLM stops the engine on a failed copy: better than an answer from half a row
                log.exception("KV-HOST-COPY: a copy between HBM and DRAM failed")
                nbytes, good = 0, False
            self._done.append(TransferResult(job_id, good, nbytes, time.perf_counter() - began))
            self._over[job_id].set()

    def _copy(self, device: GPULoadStoreSpec, host: Any, store: bool) -> int:
        """Whole pages of each tensor the group uses. Returns bytes copied."""
        nbytes = block_at = chunk_at = 0
        per = self._blocks_per_chunk
        chunk_ids = host.chunk_ids if hasattr(host, "chunk_ids") else host.block_ids
        for group, (count, first) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
            if not count:
                continue
            skip = first % per  # the first block may lie inside its chunk
            chunks = -(-(count + skip) // per)
            blocks, rows = device.block_ids[block_at : block_at + count], chunk_ids[chunk_at : chunk_at + chunks]
            block_at, chunk_at = block_at + count, chunk_at + chunks
            for index, used in self._used[group].items():
                pages, cells = self._device[index], self._host[index]
                size = pages.shape[1]
                for i in range(count):
                    row, at = cells[rows[(i + skip) // per]], (i + skip) % per * size
                    if store:
                        row[at : at + used] = pages[blocks[i]][:used]
                        row[at + used : at + size] = 0
                    else:
                        pages[blocks[i]][:used] = row[at : at + used]
                nbytes += count * used
            if store:
                self._blank(group, rows, skip, (skip + count) % per)
        return nbytes

    def _blank(self, group: int, rows: Any, skip: int, tail: int) -> None:
        """Zero what the group does not write of its rows: they held other chunks, perhaps another tenant's."""
        for index, cells in enumerate(self._host):
            size = self._device[index].shape[1]
            if index not in self._used[group]:
                for row in rows:
                    cells[row] = 0
                continue
            if skip:
                cells[rows[0]][: skip * size] = 0
            if tail:
                cells[rows[-1]][tail * size :] = 0


def _used(refs: Any) -> dict[int, int]:
    """Tensor -> bytes of a page that a cache group uses (from its start)."""
    out: dict[int, int] = {}
    for ref in refs:
        out[ref.tensor_idx] = max(out.get(ref.tensor_idx, 0), ref.page_size_bytes)
    return out
