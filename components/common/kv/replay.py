"""Replay of a request trace against a retention policy, on a virtual clock: what a byte budget earns.

The real catalogue, the real verdict and the real policies run; only time and Blob are imagined. A request
hits the longest prefix of its chunks that is present; chunks after it are computed and put. A sweep runs
every `sweep_s` and deletes what `retention.verdict` says, as the sweeper does.

Traces: JSON lines {"timestamp": ms, "input_length": tokens, "hash_ids": [...]} (Mooncake's format).
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.kv.catalogue import Catalogue
from components.common.kv.classes import Classes
from components.common.kv.keys import PUBLIC
from components.common.kv.retention import (
    F64,
    Columns,
    Lru,
    OldestFirst,
    Policy,
    ReuseModel,
    Worth,
    chain_rank,
    value_per_byte,
    verdict,
)
from components.common.messages.tenants import RetentionClass


class Shape(NamedTuple):
    """What one chunk of a class weighs (bytes) and what one hit on it saves (seconds: recompute minus load)."""

    nbytes: int
    saves: float


class Request(NamedTuple):
    at: float
    cls: str
    chunks: tuple[str, ...]


class Result(NamedTuple):
    """Outcome of one replay. `provisioned_gb_hours` = budget x duration; `held_gb_hours` = integral of bytes held."""

    policy: str
    requests: int
    chunks: int
    hits: int
    seconds_saved: float
    provisioned_gb_hours: float
    held_gb_hours: float
    puts: int
    deleted_ttl: int
    deleted_budget: int

    @property
    def per_provisioned(self) -> float:
        return self.seconds_saved / self.provisioned_gb_hours

    @property
    def per_held(self) -> float:
        return self.seconds_saved / self.held_gb_hours if self.held_gb_hours else 0.0


def chunk_name(cls: str, number: int | str) -> str:
    h = blake3(f"{cls}/{number}".encode()).hexdigest()
    return f"{PUBLIC}/{blake3(cls.encode()).hexdigest()[:24]}{0:08x}/{h[:2]}/{h}"


def read_trace(path: Path | str, block_tokens: int = 512, limit: int = 0) -> list[tuple[float, list[int]]]:
    """[(seconds, ids of full chunks)], in order of time. The last, partial block of a prompt is no chunk.

    Raises REPLAY-TRACE with the line that is no request.
    """
    out = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            raw = json.loads(line)
            ids = raw["hash_ids"][: int(raw["input_length"]) // block_tokens]
            out.append((float(raw["timestamp"]) / 1e3, ids))
        except (ValueError, KeyError, TypeError) as e:
            raise DynamoBlobError(
                "REPLAY-TRACE", "not a request of a trace", where=f"{path}:{number}", why=f"{type(e).__name__}: {e}",
                do='each line is {"timestamp": ms, "input_length": tokens, "hash_ids": [...]}',
            ) from None  # fmt: skip
        if limit and len(out) >= limit:
            break
    return sorted(out, key=lambda r: r[0])


def footprint(requests: Iterable[Request], shapes: Mapping[str, Shape]) -> int:
    """Bytes of every distinct chunk: what an unbounded store would hold at the end."""
    seen: dict[str, int] = {}
    for r in requests:
        for c in r.chunks:
            seen[c] = shapes[r.cls].nbytes
    return sum(seen.values())


class Clairvoyant:
    """The offline oracle: knows every future use. Rank = value per byte ÷ time to the next use; never used again = 0.

    Belady's rule, so optimal where all chunks weigh and save the same; greedy where they do not: `bound` limits both.
    """

    name = "oracle"

    def __init__(self, requests: Sequence[Request]) -> None:
        self._uses: dict[int, list[float]] = {}
        for r in requests:
            for c in r.chunks:
                self._uses.setdefault(int(c[-64:-48], 16), []).append(r.at)

    def rank(self, rows: Columns, now: float) -> F64:
        fragments = np.ascontiguousarray(rows.key[:, :8]).view(">u8").ravel().tolist()
        wait = np.empty(len(fragments))
        for i, f in enumerate(fragments):
            uses = self._uses[f]
            at = bisect.bisect_left(uses, now)
            wait[i] = uses[at] - now if at < len(uses) else np.inf
        return chain_rank(value_per_byte(rows) / np.maximum(wait, 1e-3), rows.parent_rows())


POLICIES: dict[str, Callable[[Sequence[Request]], Policy]] = {
    "worth": lambda _: Worth(ReuseModel()),
    "lru": lambda _: Lru(),
    "ttl": lambda _: OldestFirst(),
    "oracle": Clairvoyant,
}


def replay(
    requests: Sequence[Request],
    shapes: Mapping[str, Shape],
    policy: Policy,
    budget_bytes: float,
    *,
    classes: Classes | None = None,
    ttl_s: float = 86400.0,
    sweep_s: float = 30.0,
) -> Result:
    """Run `requests` through a store of `budget_bytes`, shared by all classes (their own budgets still hold).

    `ttl_s` is the TTL of every class when `classes` is not given.
    """
    if classes is None:
        rule = RetentionClass(ttl_s=ttl_s, max_ttl_s=max(ttl_s, 604800.0), bytes=2**62)
        classes = Classes(dict.fromkeys(shapes, rule), next(iter(shapes)), "kv")
    now = requests[0].at
    model = policy.model if isinstance(policy, Worth) else None
    catalogue = Catalogue(
        1 << max(10, len({c for r in requests for c in r.chunks}).bit_length()), reuse=model, clock=lambda: now
    )
    next_sweep, before, first = now + sweep_s, now, now
    hits = chunks = puts = 0
    saved = held = 0.0
    deleted = {"ttl": 0, "budget": 0}

    def sweep(at: float) -> None:
        nonlocal before, held
        held += catalogue.bytes * (at - before)
        rows = catalogue.columns()
        if model is not None:
            model.expose(rows, at, before)
        doomed = verdict(rows, classes, policy, at, total_bytes=budget_bytes)
        for i, reason in zip(doomed.rows.tolist(), doomed.reasons, strict=True):
            catalogue.discard(rows.name(i))
            deleted[reason] += 1
        before = at

    for request in requests:
        while request.at >= next_sweep:
            now = next_sweep
            sweep(now)
            next_sweep += sweep_s
        now, shape, parent, missed = request.at, shapes[request.cls], None, False
        for chunk in request.chunks:
            chunks += 1
            if not missed and catalogue.lookup(chunk):
                hits, saved = hits + 1, saved + shape.saves
                catalogue.note_hit(chunk)
            else:
                missed = True
                puts += chunk not in catalogue
                catalogue.note_put(chunk, shape.nbytes, request.cls, shape.saves, parent)
            parent = chunk
    sweep(requests[-1].at)
    hours = (requests[-1].at - first) / 3600
    return Result(
        policy.name, len(requests), chunks, hits, saved, budget_bytes / 1e9 * hours, held / 3600 / 1e9, puts, deleted["ttl"], deleted["budget"],
    )  # fmt: skip


def bound(
    requests: Sequence[Request],
    shapes: Mapping[str, Shape],
    budget_bytes: float,
    *,
    sweep_s: float = 30.0,
    rounds: int = 400,
) -> float:
    """Seconds that no policy can exceed in `replay`, whatever it knows: what 1.2x LRU is to be judged against.

    A chunk's next use is a hit only if the chunk is held over every sweep in between, and after a sweep no more than the
    budget is held. The dual of that linear program is a price per byte and sweep; every price vector gives a bound, the
    best of `rounds` subgradient steps is returned. Chains are ignored, which only raises it.
    """
    first, last_use, free = requests[0].at, dict[str, float](), 0.0
    counted: dict[tuple[int, int, Shape], int] = {}
    for r in requests:
        shape = shapes[r.cls]
        for chunk in r.chunks:
            before = last_use.get(chunk)
            last_use[chunk] = r.at
            if before is None:
                continue
            low, high = int((before - first) / sweep_s), int((r.at - first) / sweep_s)
            if low >= high:
                free += shape.saves
            else:
                counted[low, high, shape] = counted.get((low, high, shape), 0) + 1
    if not counted:
        return free
    low_, high_ = np.array([k[0] for k in counted]), np.array([k[1] for k in counted])
    weight, saves = np.array([k[2].nbytes for k in counted], float), np.array([k[2].saves for k in counted])
    many = np.array(list(counted.values()), float)
    price: F64 = np.zeros(int(high_.max()))
    best, scale = float("inf"), float((saves / weight).max() / np.average(high_ - low_, weights=many))
    for n in range(rounds):
        paid = np.concatenate([[0.0], np.cumsum(price)])
        gain = saves - weight * (paid[high_] - paid[low_])
        kept = np.where(gain > 0, many, 0.0)
        best = min(best, float(price.sum() * budget_bytes + (kept * gain).sum()))
        held = np.bincount(low_, kept * weight, len(price) + 1) - np.bincount(high_, kept * weight, len(price) + 1)
        excess = np.cumsum(held)[:-1] - budget_bytes
        price = np.maximum(0.0, price + scale / np.sqrt(1 + n) * excess / max(float(np.abs(excess).max()), 1e-12))
    return free + best
