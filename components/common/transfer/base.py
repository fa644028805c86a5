"""Moving whole objects between a staging slot and a store, without ever blocking the caller.

The contract every back end keeps, whatever NIXL or the store does:

* An operation ends exactly once, by `done(outcome)`, no later than its deadline.
* After `LATE` nobody but this package touches the slot again: it is quarantined until the transfer
  is known to be over (a late write hits only quarantined memory), then it returns to the pool.
  The caller must not release the slot after `LATE`; after every other outcome it must.
* `DONE` of a read says that the store sent something, not that it is right: a truncated or flipped
  object ends `DONE` too. Callers prove content themselves (kv.objects).
* `DONE` of a write: the whole object is visible, or was before; never a part of it.
* `MISSING` is the store's word that the object does not exist; `FAILED` is anything else; `REFUSED`
  means that nothing was tried (breaker open, closed, no memory left outside quarantine).
* `done` is called on the back end's thread (or, for `REFUSED`, the caller's): keep it short.
* Memory given to a transfer is never freed while the process lives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from components.common.transfer.staging import Slot, StagingPool


class Outcome(StrEnum):
    DONE = "done"
    MISSING = "missing"
    FAILED = "failed"
    LATE = "late"
    REFUSED = "refused"


Done = Callable[[Outcome], None]
Known = Callable[[dict[str, bool | None]], None]
"""Answer of an existence question: name -> True, False, or None (not known: error or too late)."""


class Connection(NamedTuple):
    """How to reach a store: parameters of the NIXL back end; unix seconds after which they are void (None = never)."""

    params: dict[str, str]
    expires: float | None = None


@dataclass(slots=True)
class Op:
    """One transfer. `deadline` is on time.monotonic()."""

    write: bool
    name: str
    slot: Slot
    nbytes: int
    deadline: float
    done: Done
    started: float = 0.0
    reported: bool = False
    handle: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


class Transport(ABC):
    """One store location (a container, a directory)."""

    pool: StagingPool

    @abstractmethod
    def read(self, name: str, slot: Slot, nbytes: int, deadline: float, done: Done) -> None:
        """First `nbytes` of object `name` into `slot`."""

    @abstractmethod
    def write(self, name: str, slot: Slot, nbytes: int, deadline: float, done: Done) -> None:
        """Create or replace object `name` with the first `nbytes` of `slot`."""

    @abstractmethod
    def exists(self, names: Sequence[str], deadline: float, known: Known) -> None:
        """Which of `names` exist; `known` is called once, by `deadline`, on another thread."""

    @abstractmethod
    def available(self, write: bool) -> bool:
        """False while the breaker of that direction is open: do not even ask."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters and gauges: flat names, numbers only."""

    @abstractmethod
    def close(self, drain_s: float) -> bool:
        """Stop. Waits up to `drain_s` seconds for transfers and questions in flight; True when none is left.

        Transfers that are still in flight keep their memory and do not hold up process exit.
        """
