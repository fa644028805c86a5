"""A cost policy whose beliefs a test replaces: what a request is decided by must not hang on how fast a busy machine was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.common.cost.config import CostConfig
from components.common.cost.policy import Policy
from components.common.kv.policy import CostPolicy


class Believing(CostPolicy):
    """While the file `beliefs` is there, the real model decides afresh by what it says; afterwards what was learned goes on.

    Totals are counted on, as a worker's metrics only rise.
    """

    def __init__(self, beliefs: str = "", **settings: Any) -> None:
        self._file, self._read, self._fresh = Path(beliefs), 0, None
        super().__init__(**settings)

    @property
    def policy(self) -> Policy:
        try:
            written = self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return self._learned
        if written != self._read:
            self._read, self._fresh = written, self._afresh(json.loads(self._file.read_text()))
        assert self._fresh is not None
        return self._fresh

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._learned = policy

    def _afresh(self, told: dict[str, Any]) -> Policy:
        config = self.config.model_dump(mode="json")
        config["hardware"] |= told.pop("hardware")
        policy = Policy(CostConfig.parse(config | told, where="beliefs"), self._learned.prefill.step_tokens)
        policy.ledger = self._learned.ledger
        return policy


@contextmanager
def believing(file: Path, compute_s: float, fixed_s: float, bytes_per_s: float, **more: Any) -> Iterator[None]:
    """`compute_s`: of 4096 tokens. `fixed_s` and `bytes_per_s`: of the store. `more`: other settings of CostConfig."""
    told = more | {
        "hardware": {"curve": [{"tokens": 128, "seconds": compute_s / 32}, {"tokens": 4096, "seconds": compute_s}]},
        "tiers": [
            {"name": "dram", "fixed_s": 1e-4, "bytes_per_s": 1e12},
            {"name": "blob", "fixed_s": fixed_s, "bytes_per_s": bytes_per_s, "via": "dram"},
        ],
    }
    part = file.with_suffix(".part")
    part.write_text(json.dumps(told))
    os.replace(part, file)
    yield
    file.unlink()
