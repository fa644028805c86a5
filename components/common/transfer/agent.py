"""One NIXL agent with one back end, driven by one thread. The only place that calls NIXL for stores.

Hazards contained here (each measured, each a test in tests/faults/test_transfer_*):
one descriptor per handle (an error on one of many leaves the others writing), device ids that are
never reused (two live registrations with one id read each other's object in silence), no release
while a transfer is in progress.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

from components.common.transfer.staging import StagingPool

os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # vLLM's own value; it warns when NIXL came first

_ids = itertools.count(1)
_names = itertools.count(1)
_FOREVER: list[Any] = []


class Agent:
    """kind: "AZURE_BLOB" (memory type OBJ) or "POSIX" (memory type FILE)."""

    def __init__(self, kind: str, params: dict[str, str], pool: StagingPool | None) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.kind, self.memory = kind, "OBJ" if kind == "AZURE_BLOB" else "FILE"
        self.name = f"dynamo-blob-{os.getpid()}-{next(_names)}"
        self._agent = nixl_agent(self.name, nixl_agent_config(backends=[]))
        self._agent.create_backend(kind, params)
        if pool is not None:
            self._staging = self._agent.register_memory([(pool.address, pool.nbytes, 0, "")], "DRAM")
        self._owner: int | None = None
        self.live = 0
        _FOREVER.append(self)

    def start(self, write: bool, address: int, nbytes: int, name: str, device: int | None = None) -> tuple[Any, Any]:
        """Begin one transfer of one descriptor; returns the handle for `state` and `finish`. Raises on refusal."""
        self._one_thread()
        device = next(_ids) if device is None else device
        registered = self._agent.register_memory([(0, nbytes, device, name)], self.memory)
        try:
            local = self._agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
            remote = self._agent.get_xfer_descs([(0, nbytes, device)], self.memory)
            handle = self._agent.initialize_xfer("WRITE" if write else "READ", local, remote, self.name)
        except Exception:
            self._agent.deregister_memory(registered)
            raise
        self.live += 1
        try:
            self._agent.transfer(handle)
        except Exception:
            self._end((handle, registered))
            raise
        return handle, registered

    def state(self, handle: tuple[Any, Any]) -> str:
        """PROC, DONE or ERR. ERR and DONE are final: this transfer writes no more."""
        try:
            state = self._agent.check_xfer_state(handle[0])
        except Exception:
            return "ERR"
        return state if state in ("PROC", "DONE") else "ERR"

    def finish(self, handle: tuple[Any, Any]) -> None:
        """Release a transfer that is over; never one in progress."""
        if self.state(handle) == "PROC":
            raise RuntimeError("a NIXL transfer in progress must not be released: it would go on writing")
        self._end(handle)

    def query(self, names: list[str]) -> list[bool]:
        """Which objects exist; blocks (without the GIL), for minutes when the store hangs. Raises when not known."""
        self._one_thread()
        answers = self._agent.query_memory([(0, 1, 0, n) for n in names], self.kind, self.memory)
        return [a is not None for a in answers]

    def retire(self) -> None:
        """Drop an agent without transfers in flight (a drained old credential)."""
        if self.live:
            raise RuntimeError("an agent with transfers in flight must be kept")
        if self in _FOREVER:
            _FOREVER.remove(self)

    def _end(self, handle: tuple[Any, Any]) -> None:
        self.live -= 1
        self._agent.release_xfer_handle(handle[0])
        self._agent.deregister_memory(handle[1])

    def _one_thread(self) -> None:
        me = threading.get_ident()
        if self._owner is None:
            self._owner = me
        elif self._owner != me:
            raise RuntimeError("a NIXL agent is driven by one thread: agents do not lock")
