"""Which prefill worker: the one that would have the prompt's KV first. Pure arithmetic, no I/O.

cost(worker) = tokens it has still to prefill for others + tokens of this prompt it would have to prefill,
a cached block counting by the tier that holds it (1 = HBM, `host` = DRAM, `blob` = Blob: what is left of a
block's prefill when it is loaded instead).

Two rules keep the pool alive (cases 37 and 38). Costs that differ by less than one block are equal: a shared chat
template's few tokens must not draw all traffic to one worker. Among equals the worker used least recently wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Overlap(NamedTuple):
    """Leading prompt blocks a worker holds, by the slowest tier needed to reach that far (cumulative)."""

    device: int = 0
    host: int = 0
    blob: int = 0


class Weights(NamedTuple):
    host: float = 0.75
    blob: float = 0.25


class Candidate(NamedTuple):
    worker: int
    overlap: Overlap
    queued_tokens: int
    """Prompt tokens booked on it and not yet prefilled."""
    last_used: float
    """When it was chosen last; 0 = never."""


class Choice(NamedTuple):
    worker: int
    overlap_blocks: int
    prefill_tokens: int
    cost: float


def credit_blocks(overlap: Overlap, weights: Weights) -> float:
    """Blocks of prefill saved, weighted by tier."""
    host = max(overlap.host - overlap.device, 0)
    blob = max(overlap.blob - max(overlap.host, overlap.device), 0)
    return overlap.device + weights.host * host + weights.blob * blob


def choose(
    candidates: Sequence[Candidate], prompt_tokens: int, block_size: int, weights: Weights | None = None
) -> Choice | None:
    """The worker to pin; None when there is none."""
    weights = weights or Weights()
    scored = []
    for c in candidates:
        blocks = max(c.overlap)
        todo = max(prompt_tokens - credit_blocks(c.overlap, weights) * block_size, 1.0)
        scored.append((c.queued_tokens + todo, blocks, todo, c))
    if not scored:
        return None
    least = min(s[0] for s in scored)
    cost, blocks, todo, best = min(
        (s for s in scored if s[0] < least + block_size), key=lambda s: (s[3].last_used, s[0], s[3].worker)
    )
    return Choice(best.worker, blocks, int(todo), cost)


def overlap_of(row: Mapping[str, int]) -> Overlap:
    """A row of KvRouter.get_overlap_scores. Its three counts are cumulative over tiers."""
    device = int(row.get("device_blocks", 0))
    host = max(int(row.get("host_pinned_blocks", 0)), device)
    return Overlap(device, host, max(int(row.get("disk_blocks", 0)), host))
