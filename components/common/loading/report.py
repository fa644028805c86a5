"""Counters of one load, and the file through which they (or the error) reach the worker's parent.

vLLM tells its parent process only "Engine core initialization failed"; the report says what happened.
Keys: manifest_bytes, verified_bytes, bytes_by_source, retries, reconnects, seconds, tensors, peak_in_flight,
service (present | absent | lost), outages, error (as `DynamoBlobError.as_json`) when the load failed.
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


class Report:
    """Thread-safe."""

    def __init__(self, path: str = "") -> None:
        self._path = path
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

    def set(self, **values: Any) -> None:
        with self._lock:
            self.values.update(values)

    def as_json(self) -> dict[str, Any]:
        with self._lock:
            return {
                "manifest_bytes": 0, "verified_bytes": 0, "retries": 0, "tensors": 0,
                **self.counts, **self.values, "bytes_by_source": dict(self.by_source),
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
