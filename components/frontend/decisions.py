"""What was decided for a request and who served it: the recent ones, by request id."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

_PREFILL = re.compile(rb'"prefill_worker_id":(\d+)')
_DECODE = re.compile(rb'"decode_worker_id":(\d+)')
_CACHED = re.compile(rb'"cached_tokens":(\d+)')
_PROMPT = re.compile(rb'"prompt_tokens":(\d+)')
_COMPLETION = re.compile(rb'"completion_tokens":(\d+)')

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
        for name, pattern in (
            ("served_prefill", _PREFILL), ("served_decode", _DECODE), ("cached_tokens", _CACHED), ("prompt_tokens", _PROMPT), ("completion_tokens", _COMPLETION)
        ):  # fmt: skip
            found = pattern.findall(tail)
            if found:
                setattr(self, name, int(found[-1]))


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
