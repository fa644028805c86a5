"""Would a request succeed now? Dynamo's own /health is true with no worker at all; this one is not."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from components.frontend.config import GatewayConfig
from components.frontend.sanitize import encode
from components.frontend.upstream import UpstreamGone, Upstreams

PROBE_S = 5.0
"""Deadline of a canary, seconds. A busy graph may be slower: that alone is no bad sign while answers keep coming."""


class Verdict(NamedTuple):
    ok: bool
    why: str


class Health:
    """A verdict is kept for `health_every_s`. It holds when Dynamo lists the model and the last thing we know of
    real requests is a success not older than `canary_after_s`; otherwise a canary of one token decides."""

    def __init__(self, config: GatewayConfig, upstreams: Upstreams) -> None:
        self.config, self.upstreams = config, upstreams
        self.verdict = Verdict(False, "not looked yet")
        self._at = -1e9
        self._lock = asyncio.Lock()
        self._last_success = -1e9
        self._last_failure = -1e9

    def saw(self, success: bool) -> None:
        """The outcome of a real request; failures are those that a healthy graph would not give."""
        if success:
            self._last_success = time.monotonic()
        else:
            self._last_failure = time.monotonic()
            self._at = -1e9

    async def look(self) -> Verdict:
        async with self._lock:  # callers at the same time share one look
            if time.monotonic() - self._at > self.config.health_every_s:
                self.verdict = await self._judge()
                self._at = time.monotonic()
        return self.verdict

    async def listed(self) -> bool:
        return self._lists(await self.upstreams.get_json("/v1/models", 2.0))

    def _lists(self, models: Any) -> bool:
        return isinstance(models, dict) and any(
            isinstance(m, dict) and m.get("id") == self.config.served_model for m in models.get("data") or ()
        )

    async def _judge(self) -> Verdict:
        models = await self.upstreams.get_json("/v1/models", 2.0)
        if models is None:
            return Verdict(False, "Dynamo's frontend does not answer")
        if not self._lists(models):
            return Verdict(
                False, f"Dynamo's frontend does not list '{self.config.served_model}': no worker of some role is there"
            )
        now = time.monotonic()
        if self._last_success > self._last_failure and now - self._last_success < self.config.canary_after_s:
            return Verdict(True, "")
        return await self._canary()

    async def _canary(self) -> Verdict:
        body = encode({"model": self.config.served_model, "prompt": "a", "max_tokens": 1, "temperature": 0})
        try:
            async with asyncio.timeout(PROBE_S):
                _, answer = await self.upstreams.post("/v1/completions", body, {"content-type": "application/json"})
                try:
                    text = await answer.read()
                finally:
                    answer.release()
        except TimeoutError:
            return Verdict(False, f"a request of one token had no answer within {PROBE_S:.0f} s")
        except (UpstreamGone, OSError) as e:
            return Verdict(False, f"Dynamo's frontend does not answer: {e}")
        if answer.status != 200:
            return Verdict(
                False,
                f"a request of one token was answered with {answer.status}: {text[:200].decode('utf-8', 'replace')}",
            )
        self._last_success = time.monotonic()
        return Verdict(True, "")
