"""What was decided for a request and who served it: the recent ones, by request id."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

_DIGITS = re.compile(rb"\d+")
_REPORTED = {
    "served_prefill": b'"prefill_worker_id":',
    "served_decode": b'"decode_worker_id":',
    "cached_tokens": b'"cached_tokens":',
    "prompt_tokens": b'"prompt_tokens":',
    "completion_tokens": b'"completion_tokens":',
}

TAIL = 4096
"""Bytes of an answer's end that hold usage and worker ids."""


@dataclass
class Record:
    """One request. `named` comes from our router; `served_*` and usage are what Dynamo and the worker reported."""

    request_id: str
    tenant: str = ""
    named: int | None = None
    """Prefill worker the router named and the gateway pinned on the try that was answered."""
    overlap_blocks: int = 0
    asked: bool = False
    pin: str = ""
    """pinned | no-router | late | none | unsure: why there is (no) pin."""
    served_prefill: int | None = None
    served_decode: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    retried: bool = False
    status: int = 0
    outcome: str = ""
    ttft_ms: float | None = None
    seconds: float = 0.0

    def read_tail(self, tail: bytes) -> None:
        """Usage and worker ids from the end of an answer (SSE or JSON). Text of the model cannot forge them: inside
        JSON strings its quotes are escaped."""
        for name, key in _REPORTED.items():
            at = tail.rfind(key)
            while at >= 0:
                digits = _DIGITS.match(tail, at + len(key))
                if digits:
                    setattr(self, name, int(digits[0]))
                    break
                at = tail.rfind(key, 0, at)


class Decisions:
    """The last `kept` records."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self._records: OrderedDict[str, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        if self.kept:
            self._records[record.request_id] = record
            while len(self._records) > self.kept:
                self._records.popitem(last=False)

    def get(self, request_id: str) -> dict[str, Any] | None:
        record = self._records.get(request_id)
        return asdict(record) if record else None
