"""A directory (NVMe) behind the transfer contract, through NIXL's POSIX plugin.

Objects are files; a write goes to a temporary name and is renamed when it is complete, so a reader
sees the whole object or none. Files that a killed process left behind end in ``.part`` and are
removed when the directory is opened.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from components.common.transfer.agent import Agent
from components.common.transfer.base import Done, Known, Op, Transport
from components.common.transfer.breaker import Breaker
from components.common.transfer.pump import Lane, Pump
from components.common.transfer.queries import Queries
from components.common.transfer.staging import Slot, StagingPool

_parts = itertools.count()
_STALE_S = 3600.0


class PosixLane(Lane):
    def __init__(self, root: Path, pool: StagingPool) -> None:
        self._root = root
        self._agent = Agent("POSIX", {}, pool)

    def start(self, op: Op) -> None:
        path = self._root / op.name
        if op.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            op.extra["part"] = path.with_name(f"{path.name}.{os.getpid()}.{next(_parts)}.part")
            fd = os.open(op.extra["part"], os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        else:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        op.extra["fd"] = fd
        try:
            op.handle = self._agent.start(op.write, op.slot.address, op.nbytes, "", device=fd)
        except Exception:
            self._drop(op)
            raise

    def state(self, op: Op) -> str:
        return self._agent.state(op.handle)

    def finish(self, op: Op) -> None:
        done = self._agent.state(op.handle) == "DONE"
        self._agent.finish(op.handle)
        if op.write and done and not op.reported:
            os.replace(op.extra["part"], self._root / op.name)
        self._drop(op)

    def retire(self) -> None:
        self._agent.retire()

    @staticmethod
    def _drop(op: Op) -> None:
        os.close(op.extra.pop("fd"))
        if op.write:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(op.extra["part"])


class PosixTransport(Transport):
    """One directory, made when it is missing."""

    def __init__(
        self, pool: StagingPool, root: Path, *, errors: int = 5, open_s: float = 1.0, max_open_s: float = 30.0
    ) -> None:
        self.pool, self.root = pool, root
        root.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=_sweep, args=(root,), name="transfer-sweep", daemon=True).start()
        self._read_breaker = Breaker(errors, open_s, max_open_s)
        self._write_breaker = Breaker(errors, open_s, max_open_s)
        self._queries = Queries(lambda: _Look(root), lambda good: None)
        self._pump = Pump(
            "posix",
            pool,
            lambda: PosixLane(root, pool),
            self._read_breaker,
            self._write_breaker,
            self._explain,
            self._tick,
        )

    def read(self, name: str, slot: Slot, nbytes: int, deadline: float, done: Done) -> None:
        self._pump.submit(Op(False, name, slot, nbytes, deadline, done))

    def write(self, name: str, slot: Slot, nbytes: int, deadline: float, done: Done) -> None:
        self._pump.submit(Op(True, name, slot, nbytes, deadline, done))

    def exists(self, names: Sequence[str], deadline: float, known: Known) -> None:
        self._queries.ask(names, deadline, known)

    def available(self, write: bool) -> bool:
        return not (self._write_breaker if write else self._read_breaker).open

    def stats(self) -> dict[str, float]:
        pump = self._pump
        return {
            **{f"{k}_total": float(v) for k, v in pump.counts.items()},
            **{f"{k}_seconds_total": v for k, v in pump.seconds.items()},
            **{f"{k}_bytes_total": float(v) for k, v in pump.bytes.items()},
            "in_flight": float(pump.in_flight),
            "lanes": float(pump.lanes),
            "staging_quarantined": float(self.pool.quarantined),
            "staging_used": float(self.pool.used),
            "read_breaker_open": float(self._read_breaker.open),
            "write_breaker_open": float(self._write_breaker.open),
        }

    def close(self, drain_s: float) -> bool:
        end = time.monotonic() + drain_s
        drained = self._pump.close(drain_s)  # first: a failed read is explained by a question
        return self._queries.close(max(0.1, end - time.monotonic())) and drained

    def _explain(self, name: str, deadline: float, answer: Callable[[bool | None], None]) -> None:
        answer((self.root / name).exists() or False)

    def _tick(self) -> None:
        for breaker in (self._read_breaker, self._write_breaker):
            if breaker.due():
                breaker.probed(os.access(self.root, os.R_OK | os.W_OK | os.X_OK))


class _Look:
    def __init__(self, root: Path) -> None:
        self._root = root

    def query(self, names: list[str]) -> list[bool]:
        return [(self._root / n).exists() for n in names]

    def retire(self) -> None:
        return


def _sweep(root: Path) -> None:
    """Remove parts of writes that no process finished (older than an hour: others may be writing)."""
    for part in root.rglob("*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _STALE_S:
                part.unlink()
