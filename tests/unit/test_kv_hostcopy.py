"""HBM <-> DRAM on the CPU platform: pages go and come back, and nothing of earlier chunks stays in a row."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

PAGE = 64


class Region:
    """Stands for SharedOffloadRegion: one int8 matrix of rows."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.all, self._at = torch.full((rows, row_bytes), 77, dtype=torch.int8), 0

    def create_next_worker_view(self, nbytes: int) -> torch.Tensor:
        view = self.all[:, self._at : self._at + nbytes]
        self._at += nbytes
        return view

    def cleanup(self) -> None: ...


@pytest.mark.parametrize("per", [1, 2])
def test_round_trip_and_no_leftovers(per: int) -> None:
    """Two tensors; group 0 uses both pages whole, group 1 only 40 bytes of the second."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    from components.common.kv.hostcopy import HostCopyWorker

    device = [torch.randint(-100, 100, (8, PAGE), dtype=torch.int8) for _ in range(2)]
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=t, page_size_bytes=PAGE) for t in device],
        group_data_refs=[
            [SimpleNamespace(tensor_idx=i, page_size_bytes=PAGE) for i in (0, 1)],
            [SimpleNamespace(tensor_idx=1, page_size_bytes=40)],
        ],
    )
    region = Region(4, 2 * PAGE * per)
    worker = HostCopyWorker(caches, per, region)
    original = [t.clone() for t in device]
    blocks = [1, 2] if per == 2 else [1]
    spec = GPULoadStoreSpec([*blocks, 3], group_sizes=(len(blocks), 1), block_indices=(0, per - 1))
    host = SimpleNamespace(chunk_ids=np.array([2, 0]))
    assert worker.submit_store(1, spec, host)
    worker.wait({1})
    (done,) = worker.get_finished()
    assert done.success and done.transfer_size == len(blocks) * 2 * PAGE + 40
    row = region.all[0].numpy()  # group 1: zeros everywhere but the 40 bytes it wrote
    at = PAGE * per + (per - 1) * PAGE
    assert (row[at : at + 40] == original[1][3][:40].numpy()).all()
    assert (np.delete(row, np.s_[at : at + 40]) == 0).all()
    for t in device:
        t.zero_()
    assert worker.submit_load(2, host, spec)
    worker.wait({2})
    for i in range(2):
        for b in blocks:
            assert (device[i][b] == original[i][b]).all()
    assert (device[1][3][:40] == original[1][3][:40]).all() and (device[1][3][40:] == 0).all()
    worker.get_finished()
    worker.shutdown()
