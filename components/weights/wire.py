"""NIXL between weight services: one agent, one thread, bounded and never waited on for ever.

Ranges are pulled (READ) into landing slots, copied out and verified where no peer can reach. NIXL has no cancel, so
a slot whose transfer is overdue is quarantined until that very transfer is over; nothing that a peer may still write
to is ever verified or used.
"""

from __future__ import annotations

import base64
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.transfer.progress import wait_for_events
from components.common.transfer.staging import Slot, StagingPool
from components.weights.cache import NodeCache
from components.weights.entry import Entry

os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")

log = logging.getLogger("dynamo_blob.weights")

_POLL_S = 0.0005
_START_S = 60.0
_IDLE_S = 30.0  # a file not asked for by peers so long is no longer registered (and so no longer pinned)


class PullFailed(Exception):
    """The range did not come; `late` = it may still be written (the slot is quarantined)."""

    def __init__(self, why: str, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


@dataclass(eq=False)
class _Pull:
    address: int
    nbytes: int
    agent: str
    metadata: bytes
    slot: Slot
    deadline: float
    over: threading.Event = field(default_factory=threading.Event)
    error: str = ""
    late: bool = False
    handle: Any = None


@dataclass(eq=False)
class _Offer:
    entry: Entry
    over: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Wire:
    """`slots` landing buffers of `range_bytes`. Every method is thread-safe; the agent lives on its own thread."""

    def __init__(self, cache: NodeCache, slots: int, range_bytes: int) -> None:
        self.cache = cache
        self.pool = StagingPool(slots, range_bytes)
        self.name = f"weights-{os.getpid()}-{os.urandom(4).hex()}"
        self._commands: queue.SimpleQueue[_Pull | _Offer | None] = queue.SimpleQueue()
        self._registered: dict[str, tuple[Entry, Any, float]] = {}
        self._known: set[bytes] = set()  # digests of metadata that were loaded: offers of several files alternate
        self._started = threading.Event()
        self._error = ""
        self.pulled = 0
        self._thread = threading.Thread(target=self._run, name="weights-wire", daemon=True)
        self._thread.start()  # NIXL imports torch, seconds: the service answers meanwhile

    @property
    def ready(self) -> bool:
        """Whether NIXL works here now; its import takes seconds."""
        return self._started.is_set() and not self._error

    def wait_started(self, at_least_s: float = 0.0) -> bool:
        """Whether NIXL works here; waits for its import, a minute at most (or `at_least_s`)."""
        return self._started.wait(max(_START_S, at_least_s)) and not self._error

    def _wait_started(self, timeout_s: float) -> None:
        if not self._started.wait(max(0.0, timeout_s)):
            raise PullFailed("NIXL is still starting")
        if self._error:
            raise PullFailed(f"NIXL cannot be used: {self._error}")

    def offer(self, entry: Entry, timeout_s: float = 5.0) -> dict[str, Any]:
        """What a peer needs to read `entry`: agent, metadata (base64), address of the file's first byte."""
        offer = _Offer(entry)
        try:
            self._wait_started(_START_S)
        except PullFailed as e:
            raise DynamoBlobError("WEIGHTS-NIXL", "NIXL cannot be used between weight services", why=str(e)) from None
        self._commands.put(offer)
        if not offer.over.wait(timeout_s) or offer.error:
            raise DynamoBlobError("WEIGHTS-NIXL", "the file cannot be offered to peers", why=offer.error or "time-out")
        return offer.answer

    @contextmanager
    def pull(self, offer: dict[str, Any], begin: int, nbytes: int, deadline: float) -> Iterator[memoryview]:
        """Bytes [begin, begin + nbytes) of the peer's file, in a landing slot that is ours inside the block.

        Copy, then verify the copy: a peer that means ill may know the slot's key. Raises PullFailed by `deadline`.
        """
        self._wait_started(deadline - time.monotonic())
        slot = self.pool.acquire(max(0.0, deadline - time.monotonic()))
        if slot is None:
            raise PullFailed("no landing slot is free")
        pull = _Pull(
            int(offer["address"]) + begin,
            nbytes,
            str(offer["agent"]),
            base64.b64decode(offer["metadata"]),
            slot,
            deadline,
        )
        self._commands.put(pull)
        pull.over.wait()  # the thread ends every pull by its deadline
        if pull.late:
            raise PullFailed("deadline", late=True)
        try:
            if pull.error:
                raise PullFailed(pull.error)
            self.pulled += nbytes
            yield slot.view[:nbytes]
        finally:
            self.pool.release(slot)

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(2)

    def _run(self) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            wait_for_events()
            self._agent = nixl_agent(self.name, nixl_agent_config(backends=["UCX"]))
            self._agent.register_memory([(self.pool.address, self.pool.nbytes, 0, "")], "DRAM")
        except Exception as e:
            self._error = f"{type(e).__name__}: {e}"
            return
        finally:
            self._started.set()
        flying: list[_Pull] = []
        swept = time.monotonic()
        while True:
            try:
                command = self._commands.get(timeout=_POLL_S if flying else 1.0)
                if command is None:
                    break
                if isinstance(command, _Offer):
                    self._register(command)
                elif self._begin(command):
                    flying.append(command)
            except queue.Empty:
                pass
            flying = [p for p in flying if not self._look(p)]
            if time.monotonic() - swept > 5:
                swept = time.monotonic()
                self._sweep()
        for p in flying:
            self._end(p, "the service stops", late=True)

    def _register(self, offer: _Offer) -> None:
        try:
            entry, key = offer.entry, offer.entry.file.blake3
            if key not in self._registered or self._registered[key][0] is not entry:
                handle = self._agent.register_memory(
                    [(int(entry.array.ctypes.data), entry.array.nbytes, 0, "")], "DRAM"
                )
                self.cache.pin(entry)
                self._forget(key)
                self._registered[key] = (entry, handle, time.monotonic())
            self._registered[key] = (*self._registered[key][:2], time.monotonic())
            offer.answer = {
                "agent": self.name, "address": int(entry.array.ctypes.data),
                "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            }  # fmt: skip
        except Exception as e:
            offer.error = f"{type(e).__name__}: {e}"
        offer.over.set()

    def _begin(self, pull: _Pull) -> bool:
        try:
            known = blake3(pull.metadata).digest()
            if known not in self._known:
                self._agent.add_remote_agent(pull.metadata)
                self._known.add(known)
            local = self._agent.get_xfer_descs([(pull.slot.address, pull.nbytes, 0)], "DRAM")
            remote = self._agent.get_xfer_descs([(pull.address, pull.nbytes, 0)], "DRAM")
            pull.handle = self._agent.initialize_xfer("READ", local, remote, pull.agent)
            self._agent.transfer(pull.handle)
            return True
        except Exception as e:
            self._end(pull, f"{type(e).__name__}: {e}")
            return False

    def _look(self, pull: _Pull) -> bool:
        """True once nothing of this pull is left to watch."""
        try:
            state = self._agent.check_xfer_state(pull.handle)
        except Exception as e:
            state = f"{type(e).__name__}: {e}"
        if state == "PROC":
            if not pull.over.is_set() and time.monotonic() >= pull.deadline:
                self.pool.quarantine(pull.slot)
                self._end(pull, "deadline", late=True)
            return False
        self._agent.release_xfer_handle(pull.handle)
        if pull.late:
            self.pool.cleared(pull.slot)
        else:
            self._end(pull, "" if state == "DONE" else state)
        return True

    def _end(self, pull: _Pull, error: str, late: bool = False) -> None:
        pull.error, pull.late = error, late
        pull.over.set()

    def _sweep(self) -> None:
        for key, (_, _, used) in list(self._registered.items()):
            if time.monotonic() - used > _IDLE_S:
                self._forget(key)

    def _forget(self, key: str) -> None:
        found = self._registered.pop(key, None)
        if found is not None:
            self._agent.deregister_memory(found[1])
            self.cache.release(found[0])
