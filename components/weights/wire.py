"""NIXL between weight services: one agent, one thread, bounded and never waited on for ever.

Ranges are pulled (READ) into landing slots, copied out and verified where no peer can reach. NIXL has no cancel, so
a slot whose transfer is overdue is quarantined until that very transfer is over; nothing that a peer may still write
to is ever verified or used.

Memory that was offered stays registered, and its file pinned, until the offers for it are over (_IDLE_S after the last
one), also when the file has got other memory meanwhile: a peer that reads late must not find other bytes there.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.transfer.progress import wait_for_events
from components.common.transfer.staging import Slot, StagingPool
from components.weights.cache import NodeCache
from components.weights.entry import Entry
from components.weights.offers import Offer

os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")

log = logging.getLogger("dynamo_blob.weights")

_POLL_S = 0.0005
_START_S = 60.0
_IDLE_S = 30.0  # a file not asked for by peers so long is no longer registered (and so no longer pinned)
_SWEEP_S = 5.0
_STUMBLE_S = 0.1
_GRACE_S = 1.0  # how long after its deadline a pull waits for the thread to end it


class PullFailed(Exception):
    """The range did not come; `late` = it may still be written (the slot is quarantined)."""

    def __init__(self, why: str, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class NoSlot(PullFailed):
    """We have no landing slot: no fault of the peer's."""


@dataclass(eq=False)
class _Pull:
    address: int
    nbytes: int
    agent: str
    metadata: bytes
    deadline: float
    slot: Slot
    over: threading.Event = field(default_factory=threading.Event)
    error: str = ""
    late: bool = False
    handle: Any = None
    _ending: threading.Lock = field(default_factory=threading.Lock)

    def end(self, error: str, late: bool = False) -> None:
        """Once, by the thread or by who waits for it in vain; the later one finds it ended. `late`: quarantines the slot."""
        with self._ending:
            if self.over.is_set():
                return
            self.error, self.late = error, late
            if late:
                self.slot.pool.quarantine(self.slot)
            self.over.set()


@dataclass(eq=False)
class _Ask:
    entry: Entry
    over: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(eq=False)
class _Registered:
    entry: Entry
    handle: Any
    used: float


class Wire:
    """`slots` landing buffers of `range_bytes`. Every method is thread-safe; the agent lives on its own thread."""

    def __init__(self, cache: NodeCache, slots: int, range_bytes: int) -> None:
        self.cache = cache
        self.pool = StagingPool(slots, range_bytes)
        self.name = f"weights-{os.getpid()}-{os.urandom(4).hex()}"
        self._commands: queue.SimpleQueue[_Pull | _Ask | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._registered: dict[str, _Registered] = {}  # with the lock, as `_metadata`
        self._retired: list[_Registered] = []  # replaced, and maybe still read by peers
        self._metadata = ""
        self._kept: list[Any] = []  # memory that NIXL would not let go of
        self._known: dict[
            bytes, str
        ] = {}  # digest of metadata that was loaded -> agent: offers of several files alternate
        self._flying: list[_Pull] = []
        self._swept = time.monotonic()
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
        """What a peer needs to read `entry` (offers.Offer as JSON, without `have`); registers it, on the thread."""
        ask = _Ask(entry)
        try:
            self._wait_started(_START_S)
        except PullFailed as e:
            raise DynamoBlobError("WEIGHTS-NIXL", "NIXL cannot be used between weight services", why=str(e)) from None
        self._commands.put(ask)
        if not ask.over.wait(timeout_s) or ask.error:
            raise DynamoBlobError("WEIGHTS-NIXL", "the file cannot be offered to peers", why=ask.error or "time-out")
        return ask.answer

    def offered(self, entry: Entry) -> dict[str, Any] | None:
        """The same without any wait; None if `entry` is not registered now."""
        with self._lock:
            found = self._registered.get(entry.file.blake3)
            if found is None or found.entry is not entry:
                return None
            found.used = time.monotonic()
            return {"agent": self.name, "address": int(entry.array.ctypes.data), "metadata": self._metadata}

    @contextlib.contextmanager
    def pull(
        self, offer: Offer, begin: int, nbytes: int, deadline: float, over: Callable[[], None] | None = None
    ) -> Iterator[memoryview]:
        """Bytes [begin, begin + nbytes) of the peer's file, in a landing slot that is ours inside the block.

        Copy, then verify the copy: a peer that means ill may know the slot's key. Raises PullFailed by `deadline` (a
        second later if the thread hangs), NoSlot when we have no slot. `over` is called, on the thread, when a pull that
        was late has ended after all.
        """
        self._wait_started(deadline - time.monotonic())
        in_vain = self.pool.quarantined == self.pool.count  # no slot comes back by one who uses it
        slot = self.pool.acquire(0.0 if in_vain else max(0.0, deadline - time.monotonic()))
        if slot is None:
            raise NoSlot("no landing slot is free")
        pull = _Pull(offer.address + begin, nbytes, offer.agent, offer.metadata, deadline, slot)
        slot.over = over
        self._commands.put(pull)
        if not pull.over.wait(max(0.0, deadline - time.monotonic()) + _GRACE_S):
            pull.end("NIXL's thread hangs", late=True)
        if pull.late:
            raise PullFailed(pull.error, late=True)
        try:
            if pull.error:
                raise PullFailed(pull.error)
            self.pulled += nbytes
            yield slot.view[:nbytes]
        finally:
            slot.over = None
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
        going = True
        while going:
            try:
                going = self._step()
            except Exception:  # whatever it is: every pull and offer of this service waits for this thread
                log.exception("NIXL's thread goes on")
                time.sleep(_STUMBLE_S)
        for p in self._flying:
            p.end("the service stops", late=True)

    def _step(self) -> bool:
        """One command, if there is one, and a look at what flies. False: the end."""
        with contextlib.suppress(queue.Empty):
            command = self._commands.get(timeout=_POLL_S if self._flying else 1.0)
            if command is None:
                return False
            if isinstance(command, _Ask):
                self._register(command)
            elif self._begin(command):
                self._flying.append(command)
        self._flying = [p for p in self._flying if not self._watched(p)]
        if time.monotonic() - self._swept > _SWEEP_S:
            self._swept = time.monotonic()
            self._sweep()
        return True

    # on the thread; none of these raises

    def _register(self, ask: _Ask) -> None:
        try:
            entry, key = ask.entry, ask.entry.file.blake3
            before = self._registered.get(key)
            if before is None or before.entry is not entry:
                memory = [(int(entry.array.ctypes.data), entry.array.nbytes, 0, "")]
                new = _Registered(entry, self._agent.register_memory(memory, "DRAM"), time.monotonic())
                try:
                    self._refresh()
                except Exception:
                    self._kept.append(entry.array)
                    raise
                self.cache.pin(entry)
                with self._lock:
                    self._registered[key] = new
                if before is not None:
                    self._retired.append(before)
            ask.answer = self.offered(entry) or {}
        except Exception as e:
            ask.error = f"{type(e).__name__}: {e}"
        ask.over.set()

    def _refresh(self) -> None:
        """`_metadata` names what is registered now."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        with self._lock:
            self._metadata = metadata

    def _begin(self, pull: _Pull) -> bool:
        """True if there is something to watch."""
        if pull.over.is_set():  # given up before it began: nobody writes to its slot
            self.pool.cleared(pull.slot)
            return False
        try:
            known = blake3(pull.metadata).digest()
            if known not in self._known:
                self._agent.add_remote_agent(pull.metadata)
                self._known[known] = pull.agent
            local = self._agent.get_xfer_descs([(pull.slot.address, pull.nbytes, 0)], "DRAM")
            remote = self._agent.get_xfer_descs([(pull.address, pull.nbytes, 0)], "DRAM")
            pull.handle = self._agent.initialize_xfer("READ", local, remote, pull.agent)
            self._agent.transfer(pull.handle)
            return True
        except Exception as e:
            self._disconnected(pull.agent)
            if pull.handle is None:
                self._finish(pull, f"{type(e).__name__}: {e}")
            else:
                self._let_go(pull, f"{type(e).__name__}: {e}")
            return False

    def _disconnected(self, agent: str) -> None:
        """NIXL forgets an agent by itself when it loses it, so its metadata is loaded again before the next pull."""
        self._known = {digest: a for digest, a in self._known.items() if a != agent}

    def _watched(self, pull: _Pull) -> bool:
        """`_look`, and no pull is looked at again because another one stumbled: a slot would be free twice."""
        try:
            return self._look(pull)
        except Exception as e:
            log.exception("a pull from %s", pull.agent)
            pull.end(f"{type(e).__name__}: {e}", late=True)
            return False

    def _look(self, pull: _Pull) -> bool:
        """True once nothing of this pull is left to watch."""
        now = time.monotonic()
        try:
            state = self._agent.check_xfer_state(pull.handle)
        except Exception as e:  # does not say that it is over: late, and asked again; in the end `_let_go` decides
            state = f"{type(e).__name__}: {e}"
            self._disconnected(pull.agent)
            pull.end(state, late=True)
            if now < pull.deadline + _IDLE_S:
                return False
        if state == "PROC":
            if now >= pull.deadline:
                pull.end("deadline", late=True)
            return False
        if state != "DONE":
            self._disconnected(pull.agent)
        self._let_go(pull, "" if state == "DONE" else state)
        return True

    def _let_go(self, pull: _Pull, error: str) -> None:
        """Release the handle. NIXL refuses that while it cannot end the transfer: then the slot is lost for good."""
        try:
            self._agent.release_xfer_handle(pull.handle)
        except Exception as e:
            log.warning("NIXL does not release a pull from %s (%s): %s", pull.agent, error or "done", e)
            if error:
                pull.end(error, late=True)
                return
        self._finish(pull, error)

    def _finish(self, pull: _Pull, error: str) -> None:
        """Nothing writes to its slot any more."""
        pull.end(error)
        if pull.late:
            self.pool.cleared(pull.slot)

    def _sweep(self) -> None:
        old = time.monotonic() - _IDLE_S
        with self._lock:  # `offered` may just use one
            idle = [r for r in [*self._registered.values(), *self._retired] if r.used < old]
            self._registered = {k: r for k, r in self._registered.items() if r not in idle}
        self._retired = [r for r in self._retired if r not in idle]
        for r in idle:
            try:
                self._agent.deregister_memory(r.handle)
            except Exception as e:
                log.warning("NIXL does not deregister %s: %s", r.entry.file.path, e)
                self._kept.append(r.entry.array)  # mapped as long as NIXL has it
            self.cache.release(r.entry)
        if idle:
            try:
                self._refresh()
            except Exception as e:
                log.warning("NIXL's metadata stays as it was: %s", e)
