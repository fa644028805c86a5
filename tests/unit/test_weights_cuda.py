"""The copy pipeline to a GPU, on a fake device (no GPU here): order, depth, and buffers held until their copy is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from components.common.loading.cuda import staged
from components.common.loading.memory import BufferPool


class Late:
    """Copies really happen only when their event is waited for: a buffer reused too early would show."""

    def __init__(self) -> None:
        self.flying = self.most = 0

    def copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self.flying += 1
        self.most = max(self.most, self.flying)
        target = torch.zeros_like(tensor)
        source, address = tensor.data_ptr(), tensor.numel()
        return target, (source, address, target)

    def use(self, tensor: torch.Tensor, event: Any) -> None: ...

    def done(self, event: Any) -> None:
        import ctypes

        source, count, target = event
        ctypes.memmove(target.data_ptr(), source, count)  # reads the address, not the tensor
        self.flying -= 1


@pytest.mark.parametrize("depth", [1, 3])
def test_order_depth_and_no_buffer_reused_under_a_copy(depth: int) -> None:
    pinned: list[int] = []
    unpinned: list[int] = []

    def pin(address: int, size: int):
        pinned.append(address)
        return lambda: unpinned.append(address)

    pool = BufferPool(1 << 30, pin=pin)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(20):
            buffer = pool.lend(1000)
            buffer[:1000] = i
            yield str(i), torch.from_numpy(buffer)[:1000]
            del buffer

    device = Late()
    found = [(name, t.numpy().copy()) for name, t in staged(tensors(), device, depth)]
    assert [n for n, _ in found] == [str(i) for i in range(20)]
    assert all((np.asarray(t) == int(n)).all() for n, t in found)
    assert device.most == depth
    assert 1 <= len(pinned) == pool.mapped <= depth + 2 and pool.reused > 0
    pool.clear()
    assert sorted(unpinned) == sorted(pinned), "nothing is unmapped while it is registered with the device"


def test_a_buffer_over_the_spare_is_unpinned_when_it_returns() -> None:
    unpinned: list[int] = []
    pool = BufferPool(0, pin=lambda address, size: lambda: unpinned.append(address))
    loan = pool.lend(1000)
    address = loan.ctypes.data
    del loan
    assert unpinned == [address]
