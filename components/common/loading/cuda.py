"""Onto a GPU: pinned segments, asynchronous copies on a stream of their own. NOT RUN on a GPU yet.

Pageable copies reach 7 GB/s on an H200 host, pinned ones 55. Segment buffers are pinned once and reused, at most `PINNED_BYTES` of them (pinning costs about 0.5 s a GiB); up to
`depth` tensors are on their way while the engine places the one before. The host tensor of a copy is held until
its event is over, so that no segment buffer is reused under a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


PINNED_BYTES = 512 * 2**20


class Device(Protocol):
    """What `staged` needs of a device; tests bring their own."""

    def copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin an asynchronous copy; the device tensor and an event that ends it."""
        ...

    def use(self, tensor: torch.Tensor, event: Any) -> None:
        """Make the engine's stream wait for `event` before it reads `tensor`."""
        ...

    def done(self, event: Any) -> None:
        """Block until `event` is over."""
        ...


class Cuda:
    """The current CUDA device with a copy stream."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        torch = self._torch
        with torch.cuda.stream(self._stream):
            target = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
            target.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return target, event

    def use(self, tensor: torch.Tensor, event: Any) -> None:
        current = self._torch.cuda.current_stream()
        current.wait_event(event)
        tensor.record_stream(current)  # the allocator must not reuse it for the copy stream meanwhile

    def done(self, event: Any) -> None:
        event.synchronize()


def pin(address: int, nbytes: int) -> Callable[[], None]:
    """Register host memory with CUDA; returns what unregisters it. Memory CUDA refuses stays pageable: slower, as right."""
    import torch

    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, nbytes, 0)) != 0:
        runtime.cudaGetLastError()  # else the next CUDA call of anyone reports this one
        return lambda: None

    def unpin() -> None:
        runtime.cudaHostUnregister(address)

    return unpin


def staged(
    tensors: Iterator[tuple[str, torch.Tensor]], device: Device, depth: int = 8
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, on the device, in the same order, at most `depth` copies ahead of the consumer."""
    flying: deque[tuple[str, torch.Tensor, torch.Tensor, Any]] = deque()

    def land() -> tuple[str, torch.Tensor]:
        name, host, target, event = flying.popleft()
        device.use(target, event)
        device.done(event)
        del host  # only now may its buffer go round
        return name, target

    for name, tensor in tensors:
        target, event = device.copy(tensor)
        flying.append((name, tensor, target, event))
        del tensor
        if len(flying) >= depth:
            yield land()
    while flying:
        yield land()
