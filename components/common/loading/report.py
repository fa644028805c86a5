"""Counters of one load, and the file through which they (or the error) reach the worker's parent.

vLLM tells its parent process only "Engine core initialization failed"; the report says what happened.
Keys: manifest_bytes, verified_bytes, bytes_by_source, retries, reconnects, seconds, tensors, peak_in_flight,
service (present | absent | lost), outages, error (as `DynamoBlobError.as_json`) when the load failed,
thread_s: seconds of all threads together by what they did or waited for (`SPENT`): tells what limits a load.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError

SPENT = {
    "gate": "a reader waits for a place in flight",
    "memory": "a reader waits for a buffer of the budget: the consumer is slower",
    "fetch": "a reader has a range on its way, its digest included",
    "hash": "of fetch: digest",
    "spread": "a reader copies what belongs to other segments",
    "cpu": "CPU time of the readers (fetch - cpu = waits for the link, or for the interpreter)",
    "starved": "the consumer waits for ranges: readers or link are slower",
    "placing": "the consumer is away with a tensor",
    "ask": "a weight service asks its peers for a range",
    "pull": "it waits for a range over NIXL",
    "keep": "it puts a range into the file, and waits for the file's pages",
    "check": "it hashes a range in the file",
    "reserve": "it gives a file its pages",
}


class Report:
    """Thread-safe. `timeline`: a list takes (thread, what, began, ended) of every stretch, for `bench.weights_cell --trace`."""

    def __init__(self, path: str = "", timeline: list[tuple[str, str, float, float]] | None = None) -> None:
        self._path, self.timeline = path, timeline
        self.thread_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.values: dict[str, Any] = {"complete": False}
        self.by_source: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[name] += amount

    def fetched(self, kind: str, nbytes: int) -> None:
        """`nbytes` came from a source of this kind and were verified."""
        with self._lock:
            self.by_source[kind] += nbytes
            self.counts["verified_bytes"] += nbytes

    def most(self, name: str, value: int) -> None:
        with self._lock:
            self.counts[name] = max(self.counts[name], value)

    def spent(self, what: str, began: float) -> None:
        """The calling thread did `what` (a key of SPENT) since `began` (time.perf_counter())."""
        now = time.perf_counter()
        self.spent_s(what, now - began)
        if self.timeline is not None:
            self.timeline.append((threading.current_thread().name, what, began, now))

    def spent_s(self, what: str, seconds: float) -> None:
        with self._lock:
            self.thread_s[what] = self.thread_s.get(what, 0.0) + seconds

    def set(self, **values: Any) -> None:
        with self._lock:
            self.values.update(values)

    def as_json(self) -> dict[str, Any]:
        with self._lock:
            return {
                "manifest_bytes": 0, "verified_bytes": 0, "retries": 0, "tensors": 0,
                **self.counts, **self.values, "bytes_by_source": dict(self.by_source),
                "thread_s": {k: round(v, 4) for k, v in self.thread_s.items()},
                "seconds": self.values.get("seconds", round(time.monotonic() - self._began, 4)),
            }  # fmt: skip

    def finish(self) -> None:
        self.set(complete=True, seconds=round(time.monotonic() - self._began, 4))
        self.write()

    def fail(self, error: DynamoBlobError) -> None:
        self.set(complete=False, error=error.as_json())
        self.write()

    def write(self) -> None:
        """Write the file (atomically); a report that cannot be written never fails the load."""
        if not self._path:
            return
        tmp = Path(f"{self._path}.{os.getpid()}.tmp")
        try:
            tmp.write_text(json.dumps(self.as_json(), sort_keys=True))
            os.replace(tmp, self._path)
        except OSError:
            tmp.unlink(missing_ok=True)
