"""An engine's steps, from when they are scheduled until their output is handled: what each computed and how long it took.

Under async scheduling the next steps are scheduled before a step's output is there; outputs come in the order of the steps.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_OPEN = 16
"""Steps without output at most; vLLM has two."""


class Step(NamedTuple):
    at: float
    """Seconds of the monotonic clock when it was scheduled."""
    tokens: int
    """Prompt tokens computed; 0 = it decodes only, or nothing is scheduled."""
    pairs: float
    """Sum over those tokens of the tokens before them."""
    reach: int
    """Longest context of them."""
    decoding: int
    ends: tuple[str, ...]
    """Requests whose prefill ends with this step."""
    teach: bool
    """Its time says something about prefill: no request of a forced mode is in it."""


class Steps:
    """One scheduler thread owns it. `untaught`: requests of a forced mode, kept by the owner."""

    def __init__(self, untaught: set[str]) -> None:
        self._untaught = untaught
        self._open: deque[Step] = deque(maxlen=_OPEN)
        self._prompts: dict[str, tuple[int, int]] = {}
        self._last_end = 0.0
        self.computed_at = 0.0
        """When the output of the last step with prompt tokens was handled."""

    def scheduled(self, out: SchedulerOutput) -> None:
        """Also a step without tokens: it has an output like every other."""
        tokens, pairs, reach, decoding = 0, 0.0, 0, 0
        ends, teach = [], True
        for new in out.scheduled_new_reqs:
            self._prompts[new.req_id] = (len(new.prompt_token_ids or ()), new.num_computed_tokens)
        cached = out.scheduled_cached_reqs
        for rid, done in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if rid in self._prompts:
                self._prompts[rid] = (self._prompts[rid][0], done)
        for rid, scheduled in out.num_scheduled_tokens.items():
            prompt, done = self._prompts.get(rid, (0, 0))
            new_tokens = min(scheduled, prompt - done)
            if new_tokens <= 0:
                decoding += 1
                continue
            tokens += new_tokens
            pairs += new_tokens * (done + new_tokens / 2)
            reach = max(reach, done + new_tokens)
            teach = teach and rid not in self._untaught
            self._prompts[rid] = (prompt, done + new_tokens)
            if done + new_tokens >= prompt:
                ends.append(rid)
        self._open.append(Step(time.monotonic(), tokens, pairs, reach, decoding, tuple(ends), teach))

    def over(self, now: float) -> tuple[Step, float] | None:
        """The output of the oldest step is handled: the step, and its seconds; None = there is no step."""
        if not self._open:
            return None
        step = self._open.popleft()
        seconds, self._last_end = now - max(step.at, self._last_end), now
        if step.tokens:
            self.computed_at = now
        return step, seconds

    def computing_since(self, at: float) -> bool:
        """Whether prompt tokens were computed at any time after `at`."""
        return self.computed_at > at or any(step.tokens for step in self._open)

    def began(self, rid: str) -> bool:
        """Whether the request was scheduled."""
        return rid in self._prompts

    def left(self) -> list[tuple[int, int]]:
        """Prompts not computed whole yet: tokens left, and tokens before them."""
        return [(n - done, done) for n, done in self._prompts.values() if done < n]

    def decoding(self) -> int:
        return sum(1 for n, done in self._prompts.values() if done >= n)

    def forget(self, rid: str) -> None:
        self._prompts.pop(rid, None)
