"""Tensor-parallel ranks of one worker on one node read the release together, once.

Each file lies in shared memory while it is needed: every rank fetches and verifies every n-th range of it and
marks it on a board that all can see; all take their tensors from the same pages. The ranks are one worker, one
trust domain, so a range is verified once, by the rank that fetched it. With a node cache none of this runs: the
weight service reads once for everybody.

    <dir>/<session>-<file>          the bytes; unlinked as soon as every rank has it open
    <dir>/<session>-<file>.board    one byte per range: 0 missing, 1 verified, 2 failed; then one byte per rank: opened
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from components.common.errors import DynamoBlobError
from components.common.registry.manifest import FileEntry

SHARED_DIR = "/dev/shm"
_LOOK_S = 0.002
_VERIFIED, _FAILED = 1, 2


@dataclass(frozen=True)
class Ranks:
    """This rank among the `size` ranks of its worker on this node; `session` is the same for all of them and unique."""

    rank: int
    size: int
    session: str
    directory: str = SHARED_DIR


class SharedFile:
    """One file that the ranks fill together. `mine(i)`: whether this rank fetches range i; the others `wait` for it."""

    def __init__(self, file: FileEntry, ranks: Ranks, deadline: float) -> None:
        self.file, self.ranks = file, ranks
        base = Path(ranks.directory) / f"dynamo-blob-{ranks.session}-{file.blake3[:32]}"
        self._path, self._board_path = base, base.with_suffix(".board")
        region = _shared(base, file.size)
        self.array: np.ndarray[Any, Any] = np.frombuffer(region, dtype=np.uint8)
        self._board = _shared(self._board_path, len(file.ranges) + ranks.size)
        self._board[len(file.ranges) + ranks.rank] = 1
        self._unlink_when_all_opened(deadline)

    def mine(self, index: int) -> bool:
        return index % self.ranks.size == self.ranks.rank

    def verified(self, index: int) -> None:
        self._board[index] = _VERIFIED

    def failed(self, index: int) -> None:
        """The other ranks stop too, at once."""
        self._board[index] = _FAILED

    def wait(self, index: int, deadline: float, stopped: Callable[[], bool]) -> bool:
        """True once the rank that owns range `index` has verified it. Raises WEIGHTS-RANK-FAILED if it could not."""
        while True:
            state = self._board[index]
            if state == _VERIFIED:
                return True
            if state == _FAILED:
                raise DynamoBlobError(
                    "WEIGHTS-RANK-FAILED", "another rank of this worker could not load its part", where=f"{self.file.path} range {index}",
                    why=f"rank {index % self.ranks.size} has the reason", do="see that rank's error",
                )  # fmt: skip
            if stopped() or time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)

    def _unlink_when_all_opened(self, deadline: float) -> None:
        """Names vanish as soon as nobody needs them: a crash after that leaves nothing behind."""
        opened = slice(len(self.file.ranges), len(self.file.ranges) + self.ranks.size)
        if self.ranks.rank != 0:
            return
        while bytes(self._board[opened]) != b"\1" * self.ranks.size:
            if time.monotonic() >= deadline:
                self.unlink()
                raise DynamoBlobError(
                    "WEIGHTS-RANK-MISSING",
                    "not every rank of this worker began to load",
                    where=self.file.path,
                    do="see the other ranks' errors",
                )
            time.sleep(_LOOK_S)
        self.unlink()

    def unlink(self) -> None:
        for path in (self._path, self._board_path):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _shared(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # else a full file system is met by a write into the mapping: SIGBUS
        return mmap.mmap(fd, size)
    except OSError as e:
        with contextlib.suppress(OSError):
            path.unlink()
        raise DynamoBlobError(
            "WEIGHTS-SHM-FULL", "shared memory has no room for the ranks' common file", where=str(path.parent), why=f"{size} bytes wanted: {e.strerror}",
            do="give the worker more shared memory (components.<role>.shm), or use a node cache", need_bytes=size,
        ) from None  # fmt: skip
    finally:
        os.close(fd)


def check_shared_budget(files: list[FileEntry], ranks: Ranks, budget: int) -> None:
    """Two files lie in shared memory at a time, and count once for all ranks. Raises WEIGHTS-BUDGET."""
    need, have = 2 * max((f.size for f in files), default=0), ranks.size * budget
    if need > have:
        raise DynamoBlobError(
            "WEIGHTS-BUDGET", "the ranks' shared memory budget does not hold two files of the release", where=ranks.directory,
            why=f"it needs {need} bytes, {ranks.size} ranks of {budget} bytes give {have}", do="raise weights.budget_bytes, or use a node cache", need_bytes=need, budget_bytes=have,
        )  # fmt: skip


def sweep(directory: str, session: str) -> None:
    """Remove what a failed load of this session left."""
    for path in Path(directory).glob(f"dynamo-blob-{session}-*"):
        with contextlib.suppress(OSError):
            path.unlink()


_STALE_S = 600.0  # another container's process ids say nothing here: only what is old goes
_NAME = re.compile(r"dynamo-blob-(\d+)-[0-9a-f]{12}-[0-9a-f]{32}(\.board)?")


def sweep_dead(directory: str = SHARED_DIR) -> None:
    """Remove what ranks that were killed between making and unlinking a file left; their session begins with a process id."""
    for path in Path(directory).glob("dynamo-blob-*"):
        found = _NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if found and not Path(f"/proc/{found[1]}").exists() and time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


def from_vllm() -> Ranks | None:
    """This process's place among the tensor-parallel ranks of its node; None without tensor parallelism."""
    import torch.distributed as dist
    from vllm.distributed import parallel_state

    try:
        group = parallel_state.get_tp_group()
    except AssertionError:
        return None
    if group.world_size == 1:
        return None
    here = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.uname().nodename
    everyone: list[Any] = [None] * group.world_size
    dist.all_gather_object(everyone, (here, f"{os.getpid()}-{os.urandom(6).hex()}"), group=group.cpu_group)
    sweep_dead()
    local = [i for i, (place, _) in enumerate(everyone) if place == here]
    if len(local) == 1:
        return None
    return Ranks(local.index(group.rank_in_group), len(local), everyone[local[0]][1])
