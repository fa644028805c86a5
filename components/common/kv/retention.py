"""What a byte in Blob is worth: expected seconds saved per byte-hour, and what to give up first.

An object's worth is (seconds one hit saves ÷ bytes) × how soon and how likely the next hit is. The
second factor is learned: hits and exposure (object-seconds without a hit) per class, number of earlier
hits and idle age give a hazard curve; its index at idle age a is

    max over horizons H of  P(hit within H | idle a) ÷ E[seconds held until hit or H | idle a]

(the Gittins index of a reuse time; hit density in the caching literature). Groups with little evidence
shrink to the average of all, and that to a hazard falling with age, which orders exactly as LRU does.

Chains: chunk k is of no use without chunks 0..k-1, so a chunk is worth at least what its best descendant is.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from components.common.kv.classes import Classes

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

EDGES: F64 = np.array([1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768, 86400, 172800, 604800], dtype=np.float64)  # fmt: skip
"""Idle-age bucket borders, seconds: fine where conversations turn, to a week."""
_EDGES: list[float] = EDGES.tolist()
_WIDTH: F64 = np.diff(np.concatenate([[0.0], EDGES, [2 * EDGES[-1]]]))
_MIDDLE: F64 = np.concatenate([[0.5], (EDGES[:-1] + EDGES[1:]) / 2, [1.5 * EDGES[-1]]])
HIT_GROUPS, TURN_GROUPS = 5, 2
_PRIOR_OBJECTS = 50.0
"""Objects' worth of evidence that the prior weighs: fewer observations than this hardly move the index."""


class Columns(NamedTuple):
    """A copy of the catalogue's live rows, one array each (n rows). Times in Unix seconds."""

    slot: I64
    key: NDArray[np.uint8]
    prefix: I64
    nbytes: F64
    created: F64
    last_hit: F64
    hits: I64
    cls: I64
    saves: F64
    parent: NDArray[np.uint64]
    turn: I64
    prefixes: tuple[str, ...]
    classes: tuple[str, ...]

    @classmethod
    def empty(cls, prefixes: tuple[str, ...] = (), classes: tuple[str, ...] = ()) -> Columns:
        i, f = np.zeros(0, np.int64), np.zeros(0)
        return cls(i, np.zeros((0, 32), np.uint8), i, f, f, f, i, i, f, np.zeros(0, np.uint64), i, prefixes, classes)

    @classmethod
    def of(cls, raw: list[NDArray[Any]], prefixes: tuple[str, ...], classes: tuple[str, ...]) -> Columns:
        """From arrays in the order of the fields, of any number type."""
        i, f = np.int64, np.float64
        slot, key, prefix, nbytes, created, last, hits, cls_, saves, parent, turn = raw
        return cls(
            slot.astype(i), key, prefix.astype(i), nbytes.astype(f), created.astype(f), last.astype(f), hits.astype(i),
            cls_.astype(i), saves.astype(f), parent.astype(np.uint64), turn.astype(i), prefixes, classes,
        )  # fmt: skip

    def name(self, i: int) -> str:
        h = bytes(self.key[i]).hex()
        return f"{self.prefixes[self.prefix[i]]}/{h[:2]}/{h}"

    def parent_rows(self) -> I64:
        """Row of each row's parent, -1 when it has none or it is gone."""
        return rows_of(self.key, self.prefix, self.parent)


class Policy(Protocol):
    """Gives every row a rank; rows of lowest rank go first. Called once a sweep, before anything is dropped."""

    name: str

    def rank(self, rows: Columns, now: float) -> F64: ...


class Verdict(NamedTuple):
    """Rows to delete, and why each: ``ttl`` or ``budget``."""

    rows: I64
    reasons: list[str]


class ReuseModel:
    """Hazard of the next hit by (class, earlier hits, idle age), learned online.

    Groups: retention class, hits so far (0 .. 4+), first turn or later. Old evidence halves every `half_life_s`.
    """

    def __init__(self, classes: int = 8, half_life_s: float = 7 * 86400) -> None:
        self._groups = classes * HIT_GROUPS * TURN_GROUPS
        self._hits: F64 = np.zeros((self._groups, len(_WIDTH)))
        self._exposed: F64 = np.zeros((self._groups, len(_WIDTH)))
        self._half_life_s, self._exposed_to = half_life_s, 0.0
        self._table: F64 | None = None

    def group(self, rows: Columns) -> I64:
        at = (rows.cls * HIT_GROUPS + np.minimum(rows.hits, HIT_GROUPS - 1)) * TURN_GROUPS + np.minimum(
            rows.turn, TURN_GROUPS - 1
        )
        return np.asarray(np.minimum(at, self._groups - 1), dtype=np.int64)

    def note_hit(self, cls: int, earlier_hits: int, turn: int, idle_s: float, at: float) -> None:
        """One hit, `at` seconds, on an object that had `earlier_hits` before and was idle for `idle_s` seconds."""
        row = (cls * HIT_GROUPS + min(earlier_hits, HIT_GROUPS - 1)) * TURN_GROUPS + min(turn, TURN_GROUPS - 1)
        row, last = min(row, self._groups - 1), bisect_right(_EDGES, idle_s)
        self._hits[row, last] += 1
        begin = max(0.0, self._exposed_to - (at - idle_s))  # idle time that no sweep has counted yet
        for bucket in range(bisect_right(_EDGES, begin), last + 1):
            low, high = _EDGES[bucket - 1] if bucket else 0.0, _EDGES[bucket] if bucket < len(_EDGES) else idle_s
            self._exposed[row, bucket] += max(0.0, min(idle_s, high) - max(begin, low))

    def expose(self, rows: Columns, now: float, since: float) -> None:
        """Objects that lay there from `since` to `now` without a hit: evidence against them."""
        group = self.group(rows)
        end = np.maximum(now - rows.last_hit, 0)
        begin = end - np.minimum(end, now - since)
        low = 0.0
        for bucket, high in enumerate([*_EDGES, np.inf]):
            held = np.minimum(end, high) - np.maximum(begin, low)
            some = held > 0
            if some.any():
                self._exposed[:, bucket] += np.bincount(group[some], held[some], minlength=self._groups)
            low = high
        keep = 0.5 ** ((now - since) / self._half_life_s)
        self._hits *= keep
        self._exposed *= keep
        self._exposed_to, self._table = now, None

    def hazard(self) -> F64:
        """(groups, buckets), hits per object-second."""
        weight = _PRIOR_OBJECTS * np.clip(_WIDTH, 30, 600)
        falling = 0.2 / (_MIDDLE + 30)
        everyone = (self._hits.sum(0) + falling * weight) / (self._exposed.sum(0) + weight)
        # before there is evidence, what was hit more often is expected sooner
        hits = (np.arange(self._groups) // TURN_GROUPS) % HIT_GROUPS
        prior = everyone * (1 + hits)[:, None] * weight
        return np.asarray((self._hits + prior) / (self._exposed + weight))

    def index(self) -> F64:
        """(groups, buckets): best hit density over horizons, per second of holding one object."""
        if self._table is None:
            hazard = self.hazard()
            leave = 1 - np.exp(-hazard * _WIDTH)
            table = np.zeros_like(hazard)
            for a in range(hazard.shape[1]):
                alive = np.cumprod(np.concatenate([np.ones((len(hazard), 1)), 1 - leave[:, a:]], axis=1), axis=1)[
                    :, :-1
                ]
                gain = np.cumsum(alive * leave[:, a:], axis=1)
                held = np.cumsum(alive * leave[:, a:] / hazard[:, a:], axis=1)
                table[:, a] = (gain / held).max(axis=1)
            self._table = table
        return self._table


class Worth:
    """Our policy: expected seconds saved per byte-second."""

    name = "worth"

    def __init__(self, model: ReuseModel | None = None) -> None:
        self.model = model or ReuseModel()

    def rank(self, rows: Columns, now: float) -> F64:
        density = self.model.index()[self.model.group(rows), np.searchsorted(EDGES, now - rows.last_hit, side="right")]
        per_byte = value_per_byte(rows)
        return chain_rank(density * per_byte, rows.parent_rows())


class Lru:
    """Baseline: least recently hit (or put) first; within one chain the tail first."""

    name = "lru"

    def rank(self, rows: Columns, now: float) -> F64:
        return chain_rank(rows.last_hit.copy(), rows.parent_rows())


class OldestFirst:
    """Baseline: age since the put only, as with a TTL and no more knowledge."""

    name = "ttl"

    def rank(self, rows: Columns, now: float) -> F64:
        return chain_rank(rows.created.copy(), rows.parent_rows())


def value_per_byte(rows: Columns) -> F64:
    """Seconds saved by one hit ÷ bytes, averaged per (class, namespace): deeper chunks save a little more than
    their parents (attention is quadratic), and a rank that followed this would give up the front of a chain first."""
    group = rows.cls * (max(rows.prefix.max(initial=0), 0) + 1) + rows.prefix
    _, at = np.unique(group, return_inverse=True)
    seconds, nbytes = np.bincount(at, rows.saves), np.bincount(at, rows.nbytes)
    return np.asarray((np.maximum(seconds, 1e-12) / np.maximum(nbytes, 1))[at])


def rows_of(key: NDArray[np.uint8], prefix: I64, parent: NDArray[np.uint64]) -> I64:
    """Row whose hash begins with the 8 bytes `parent` within the same prefix; -1 = none. O(n log n)."""
    if not len(key):
        return np.zeros(0, np.int64)
    fragment = np.ascontiguousarray(key[:, :8]).view(">u8").ravel().astype(np.uint64) ^ (
        prefix.astype(np.uint64) << np.uint64(40)
    )
    wanted = parent ^ (prefix.astype(np.uint64) << np.uint64(40))
    order = np.argsort(fragment, kind="stable")
    at = np.minimum(np.searchsorted(fragment[order], wanted), len(order) - 1)
    found = order[at]
    return np.where((parent != 0) & (fragment[found] == wanted) & (found != np.arange(len(key))), found, -1)


def chain_rank(rank: F64, parent: I64) -> F64:
    """Raise every rank to just above the highest among its descendants: O(n log depth) by pointer doubling."""
    out, up, levels = rank.astype(np.float64).copy(), parent.copy(), 0
    while (has := np.nonzero(up >= 0)[0]).size and levels < 40:
        np.maximum.at(out, up[has], out[has])
        up[has] = up[up[has]]
        levels += 1
    return out


def depths(parent: I64) -> I64:
    """Distance of each row from the root of its chain (pointer doubling)."""
    up = parent.copy()
    depth = (up >= 0).astype(np.int64)
    for _ in range(40):
        has = np.nonzero(up >= 0)[0]
        if not has.size:
            break
        depth[has] += depth[up[has]]
        up[has] = up[up[has]]
    return depth


def verdict(
    rows: Columns,
    classes: Classes,
    policy: Policy,
    now: float,
    *,
    total_bytes: float | None = None,
    most: int | None = None,
) -> Verdict:
    """What one sweep deletes: everything past its TTL, then the lowest ranks of each class over its byte budget,
    then the lowest ranks of all classes over `total_bytes` (the account's budget; None = none).

    Ties (one chain, one time) go tail first. `most`: bound on deletions of one sweep, so that a sweep has an end.
    """
    n = len(rows.slot)
    if not n:
        return Verdict(np.zeros(0, np.int64), [])
    rules = [classes.get(c) for c in rows.classes]
    ttl = np.array([r.ttl_s for r in rules])[rows.cls]
    max_ttl = np.array([r.max_ttl_s for r in rules])[rows.cls]
    dead = now >= np.minimum(np.maximum(rows.last_hit, rows.created) + ttl, rows.created + max_ttl)
    reason = np.where(dead, 1, 0)
    lead: dict[str, int] = {}
    shared = [lead.setdefault(classes.effective(c), i) for i, c in enumerate(rows.classes)]
    owner = np.array(shared)[rows.cls]  # classes that the file does not know share the default's budget
    held = np.bincount(owner, np.where(dead, 0, rows.nbytes), minlength=len(rows.classes))
    over = {c: held[c] - rule.bytes for c, rule in enumerate(rules) if held[c] > rule.bytes}
    kept = held.sum() - sum(over.values())
    if over or (total_bytes is not None and kept > total_bytes):
        rank, depth = policy.rank(rows, now), depths(rows.parent_rows())
        order = np.lexsort((-depth, rank))
        for c, excess in over.items():
            _give_up(order[(owner[order] == c) & ~dead[order]], rows.nbytes, excess, reason)
        if total_bytes is not None:
            left = order[reason[order] == 0]
            _give_up(left, rows.nbytes, float(rows.nbytes[left].sum()) - total_bytes, reason)
    chosen = np.nonzero(reason)[0]
    if most is not None and len(chosen) > most:
        chosen = chosen[np.argsort(rows.last_hit[chosen], kind="stable")[:most]]
    return Verdict(chosen, ["ttl" if reason[i] == 1 else "budget" for i in chosen])


def _give_up(order: I64, nbytes: F64, excess: float, reason: I64) -> None:
    """Mark the first rows of `order` until `excess` bytes are gone."""
    if excess > 0:
        enough = int(np.searchsorted(np.cumsum(nbytes[order]), excess)) + 1
        reason[order[:enough]] = 2
