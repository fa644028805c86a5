"""Purge generations: what makes a purge final while puts are still in flight.

A NIXL put can carry neither metadata nor a condition, so a purge cannot stop it from landing. It can
make it worthless: the generation of the tenant is part of the object's *name*. The last 8 of the 32 hex
digits of a name's namespace are the generation:

    scoped namespace = namespace[:24] + f"{generation:08x}"

One small object, ``_control/epochs.json`` in the KV container of the graph, holds every tenant's
generation (absent = 0) and is changed by ETag compare-and-swap. `dynamo purge` raises it first and deletes afterwards:

  * a put begun before the purge lands under the old name: nobody who knows the new generation looks
    there, and listing alone tells that it is late, so the purge's second pass and the sweeper delete it;
  * a worker that cannot read the object for `stale_s` answers None: no lookups, no puts (fail closed),
    so `stale_s` + the tier's put deadline bounds the time after which no old object can appear or be used.

The tier's part is two lines: ``ns = epochs.scope(tenant, namespace)``; None = miss, drop the store.
A missing object is generation 0; in one process a generation never goes back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

EPOCHS_OBJECT = "_control/epochs.json"
FORMAT = "dynamo-blob.epochs/1"
MAX_GENERATION = 2**32 - 1


def scoped(namespace: str, generation: int) -> str:
    """Namespace of a tenant's objects at a generation: 32 hex in, 32 hex out."""
    if len(namespace) != 32 or not 0 <= generation <= MAX_GENERATION:
        raise ValueError(f"namespace of 32 hex digits and a generation below 2^32, not {namespace!r}, {generation}")
    return f"{namespace[:24]}{generation:08x}"


def generation_of(namespace: str) -> int:
    """Generation in a scoped namespace."""
    return int(namespace[24:], 16)


class Epochs:
    """Every tenant's generation, read in the background; never blocks the caller.

    read       returns {tenant (32 hex): generation}; raises when the store cannot answer
    refresh_s  seconds between reads
    stale_s    seconds after the last good read from which nothing is answered any more
    on_raise   called with (tenant, generation) in the reading thread when a generation is higher than it was known
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, int]],
        *,
        refresh_s: float = 5.0,
        stale_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
        on_raise: Callable[[str, int], object] | None = None,
    ) -> None:
        if stale_s <= refresh_s:
            raise ValueError("stale_s must exceed refresh_s")
        self._read, self._refresh_s, self._stale_s, self._clock = read, refresh_s, stale_s, clock
        self._known: dict[str, int] = {}
        self._good_at: float | None = None
        self._on_raise = on_raise
        self._stop, self._wake, self._tried = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.failures = self.throttled = 0
        self.last_error = ""

    def start(self) -> Epochs:
        """Begin reading in a daemon thread."""
        self._thread = threading.Thread(target=self._run, name="kv-epochs", daemon=True)
        self._thread.start()
        return self

    def wait_first(self, deadline_s: float) -> None:
        """Until the first read has ended, well or not: what is computed before would never be stored."""
        self._tried.wait(deadline_s)

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread:
            self._thread.join(timeout=self._refresh_s + 5)

    def look_now(self) -> None:
        """Let the background thread read at once instead of at its next turn (a purge was announced). Never blocks."""
        self._wake.set()

    def generation(self, tenant: str) -> int | None:
        """Current generation of a tenant; None while it is not known for certain."""
        # the time is taken before the map: a read that ends in between only makes the answer newer
        good = self._good_at
        if good is None or self._clock() - good >= self._stale_s:
            return None
        return self._known.get(tenant, 0)

    def scope(self, tenant: str, namespace: str) -> str | None:
        """The namespace to use for this tenant now; None = neither look up nor store."""
        generation = self.generation(tenant)
        return None if generation is None else scoped(namespace, generation)

    def current(self, tenant: str, namespace: str) -> bool:
        """Whether a scoped namespace is still the tenant's current one: asked again when a put is DONE."""
        generation = self.generation(tenant)
        return generation is not None and generation_of(namespace) == generation

    def refresh(self) -> bool:
        """One read, in the caller's thread. False (and counted) when the store did not answer."""
        begun = self._clock()  # what was read is at least this fresh
        try:
            found = self._read()
        except Exception as e:
            self.failures += 1
            self.throttled += getattr(e, "code", "") in ("STORAGE-THROTTLED", "STORAGE-BUSY")
            self.last_error = f"{type(e).__name__}: {e}"[:300]
            return False
        merged = dict(self._known)
        for tenant, generation in found.items():
            merged[tenant] = max(generation, merged.get(tenant, 0))
        before, self._known, self._good_at = self._known, merged, begun
        for tenant, generation in merged.items():
            if self._on_raise is not None and generation > before.get(tenant, 0):
                try:
                    self._on_raise(tenant, generation)
                except Exception as e:  # advice to others; what is answered here does not depend on it
                    self.last_error = f"on_raise: {type(e).__name__}: {e}"[:300]
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            self.refresh()
            self._tried.set()
            self._wake.wait(self._refresh_s)
            self._wake.clear()
