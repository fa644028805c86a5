"""The catalogue: what lies in Blob, what it weighs, and what it has been good for.

One index in three roles: the tier's existence index, the router's view of the shared tier and the
sweeper's list. It is advice: stale in either direction costs a bounded miss, because every object
proves itself at load. Nothing here blocks or does I/O.

Built for 10^6 objects: parallel arrays beside a table of names (slots.py), about 72 bytes an object. At capacity the
worst of a small sample is forgotten (the sweeper still finds it by listing) and counted.

Thread-safe: one lock, held for microseconds.
"""

from __future__ import annotations

import math
import random
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from components.common.kv.keys import parse_name
from components.common.kv.retention import Columns, ReuseModel
from components.common.kv.slots import Slots

_SAMPLE = 8
_NEGATIVES = 4096
_MAX_U32 = 2**32 - 1
_MAX_SAVES = 1e6  # seconds one hit saves, at most: more is no measurement
SKEW_S = 300
"""Seconds a worker's clock may differ from the store's; beyond it the store's time counts."""


class Entry(NamedTuple):
    """One object as the catalogue knows it. Times in Unix seconds; `saves` = seconds one hit saves."""

    name: str
    nbytes: int
    cls: str
    created: int
    last_hit: int
    hits: int
    saves: float
    parent: int
    turn: int = 0

    @property
    def seconds_saved(self) -> float:
        return self.hits * self.saves


class Catalogue:
    """Index of Blob objects by name (``<tenant>/<namespace>/<2 hex>/<hash>``).

    capacity     most objects held; memory is bounded by it
    negative_s   seconds a name reported gone is answered False without asking anybody
    reuse        learns from every hit here (the sweeper's); None where nobody ranks
    complete_s   seconds after a full listing (or a caught-up journal) during which a name not known counts as absent
    """

    def __init__(
        self,
        capacity: int = 2**20,
        *,
        negative_s: float = 30.0,
        complete_s: float = 60.0,
        reuse: ReuseModel | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 1 <= capacity < 2**31:
            raise ValueError("capacity is between 1 and 2^31")
        self.capacity, self.clock = capacity, clock
        self._negative_s, self._complete_s, self._reuse = negative_s, complete_s, reuse
        self._slots = Slots(capacity)
        rows, zero = capacity + 1, bytes(4)
        self._nbytes = array("I", zero * rows)
        self._created, self._last_hit = array("I", zero * rows), array("I", zero * rows)
        self._hits, self._cls = array("H", bytes(2 * rows)), array("B", bytes(rows))
        self._saves, self._parent = array("f", zero * rows), array("Q", bytes(8 * rows))
        self._turn = array("B", bytes(rows))
        self._classes: list[str] = []
        self._gone: OrderedDict[str, float] = OrderedDict()
        self._complete_at = -math.inf
        self._lock = threading.Lock()
        self._random = random.Random(0)
        self.bytes = 0
        self.counters = {"puts": 0, "hits": 0, "gone": 0, "forgotten": 0, "ignored": 0, "redated": 0}

    # --- what the tier calls -----------------------------------------------------------------

    def lookup(self, name: str) -> bool | None:
        """True: known to exist. False: known not to. None: not known, ask the store if it is worth it."""
        with self._lock:
            return self._lookup(name)

    def lookup_many(self, names: Iterable[str]) -> list[bool | None]:
        """`lookup` of each, under one lock."""
        with self._lock:
            return [self._lookup(n) for n in names]

    def note_put(self, name: str, nbytes: int, cls: str, seconds_saved: float, parent: str | None = None) -> None:
        """An object became visible (its put is DONE). `seconds_saved`: recompute minus load, of one hit on it.

        `parent`: name of the chunk before it in its chain, when known; it lets a quarantine find descendants.
        """
        now = int(self.clock())
        self.add(Entry(name, nbytes, cls, now, now, 0, seconds_saved, fragment(parent)))
        self.counters["puts"] += 1

    def note_hit(self, name: str, at: float | None = None) -> None:
        """The object was loaded and proven (at `at`, default now). A name not known is ignored: listing will bring it."""
        with self._lock:
            slot = self._slots.find(name)
            if slot:
                now = self.clock() if at is None else at
                if self._reuse is not None:
                    idle = max(0.0, now - self._last_hit[slot])
                    self._reuse.note_hit(self._cls[slot], self._hits[slot], self._turn[slot], idle, now)
                self._last_hit[slot] = max(self._last_hit[slot], int(now))
                self._hits[slot] = min(self._hits[slot] + 1, 65535)
                self.counters["hits"] += 1

    def note_gone(self, name: str, reason: str) -> None:
        """The object is not there, or must not be used (`reason`: deleted, absent, digest, purged, quarantined, ...)."""
        with self._lock:
            self._remove(name)
            self._gone[name] = self.clock() + self._negative_s
            self._gone.move_to_end(name)
            while len(self._gone) > _NEGATIVES:
                self._gone.popitem(last=False)
            key = f"gone.{reason}"
            self.counters[key] = self.counters.get(key, 0) + 1
            self.counters["gone"] += 1

    # --- what listing, journal, sweeper and router call ----------------------------------------

    def add(self, entry: Entry) -> None:
        """Insert or merge: hits and times never go backwards. Names that are no KV object are ignored and counted;
        numbers that cannot be are brought to the nearest that can."""
        parsed = parse_name(entry.name)
        if parsed is None:
            self.counters["ignored"] += 1
            return
        key, entry = bytes.fromhex(parsed.hash), _sound(entry)
        with self._lock:
            cls = self._class_id(entry.cls)
            self._gone.pop(entry.name, None)
            slot = self._slots.find(entry.name)
            if slot:
                self.bytes += entry.nbytes - self._nbytes[slot]
                self._last_hit[slot] = max(self._last_hit[slot], entry.last_hit)
                self._hits[slot] = max(self._hits[slot], entry.hits)
                if entry.saves:
                    self._saves[slot] = entry.saves
                if entry.parent:
                    self._parent[slot] = entry.parent
            else:
                if self._slots.count >= self.capacity:
                    self._forget_one()
                slot = self._slots.insert(entry.name, key)
                self._created[slot] = entry.created
                self._last_hit[slot] = max(entry.last_hit, entry.created)
                self._hits[slot] = entry.hits
                self._saves[slot], self._parent[slot] = entry.saves, entry.parent
                self._turn[slot] = entry.turn or self._turn_after(slot, entry.parent)
                self.bytes += entry.nbytes
            self._nbytes[slot] = entry.nbytes
            self._cls[slot] = cls

    def found(self, name: str, nbytes: int, cls: str, modified: float) -> None:
        """A listing saw the object: size and date are the store's, whatever a worker's clock said of it.

        `cls` counts for names not known. A date within SKEW_S stays; hits lie between the put and now.
        """
        with self._lock:
            slot = self._slots.find(name)
            if slot:
                self._gone.pop(name, None)
                at, now, size = int(modified), int(self.clock()), min(nbytes, _MAX_U32)
                self.bytes += size - self._nbytes[slot]
                self._nbytes[slot] = size
                if abs(self._created[slot] - at) > SKEW_S:
                    self._created[slot] = at
                    self.counters["redated"] += 1
                last = self._last_hit[slot] if self._hits[slot] else self._created[slot]
                self._last_hit[slot] = max(self._created[slot], now if last > now + SKEW_S else last)
                return
        self.add(Entry(name, nbytes, cls, int(modified), int(modified), 0, 0.0, 0))

    def get(self, name: str) -> Entry | None:
        with self._lock:
            slot = self._slots.find(name)
            return self._entry(slot) if slot else None

    def discard(self, name: str) -> bool:
        """Forget a name without remembering that it is gone. True if it was known."""
        with self._lock:
            return self._remove(name)

    def drop_before(self, tenant: str, generation: int) -> int:
        """Forget what a purge made unreachable: the tenant's objects of older generations. A scan, for the background."""
        old = [p for p in self.prefixes() if p[:32] == tenant and int(p[-8:], 16) < generation]
        return sum(self.discard(e.name) for prefix in old for e in self.entries(prefix))

    def mark_complete(self, at: float | None = None) -> None:
        """Everything in the store as of `at` (default: now) is in here; until `at + complete_s` unknown means absent."""
        self._complete_at = max(self._complete_at, self.clock() if at is None else at)

    @property
    def complete(self) -> bool:
        return self.clock() - self._complete_at < self._complete_s

    def entries(self, prefix: str = "", batch: int = 4096) -> Iterator[Entry]:
        """Every entry whose name starts with `prefix`; the lock is held for one batch at a time.

        Not a point in time: entries that come or go meanwhile may be seen or not.
        """
        at = 1
        slots = self._slots
        while at < slots.top:
            with self._lock:
                stop = min(at + batch, slots.top)
                found = [
                    self._entry(s)
                    for s in range(at, stop)
                    if slots.prefix[s] and slots.prefixes[slots.prefix[s]].startswith(prefix[:65])
                ]
            at = stop
            yield from (e for e in found if e.name.startswith(prefix))

    def columns(self, batch: int = 65536) -> Columns:
        """A copy of all live rows, for ranking; the lock is held for one batch at a time."""
        at_slots, prefixes = self._slots, self._slots.prefixes
        sources = (
            at_slots.prefix,
            self._nbytes,
            self._created,
            self._last_hit,
            self._hits,
            self._cls,
            self._saves,
            self._parent,
            self._turn,
        )
        parts: list[tuple[np.ndarray, ...]] = []
        for at in range(1, at_slots.top, batch):
            with self._lock:
                slots = np.nonzero(np.frombuffer(at_slots.prefix, "I")[at : min(at + batch, at_slots.top)])[0] + at
                keys = np.frombuffer(at_slots.keys, np.uint8).reshape(-1, 32)[slots]
                parts.append((slots, keys, *(np.frombuffer(c, c.typecode)[slots] for c in sources)))
        if not parts:
            return Columns.empty(tuple(prefixes), tuple(self._classes))
        return Columns.of([np.concatenate(p) for p in zip(*parts, strict=True)], tuple(prefixes), tuple(self._classes))

    def prefixes(self) -> dict[str, int]:
        """{``<tenant>/<namespace>``: objects}."""
        with self._lock:
            return {p: n for p, n in zip(self._slots.prefixes, self._slots.prefix_counts, strict=True) if n}

    def descendants(self, name: str) -> list[str]:
        """Names of all known entries whose chain goes through `name` (it excluded). A scan: for quarantine, not for requests."""
        children: dict[int, list[str]] = {}
        for e in self.entries(name[:65] + "/"):
            if e.parent:
                children.setdefault(e.parent, []).append(e.name)
        out, todo = [], [name]
        while todo:
            found = children.pop(fragment(todo.pop()), [])
            out += found
            todo += found
        return out

    def __len__(self) -> int:
        return self._slots.count

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def nbytes_resident(self) -> int:
        """Bytes the arrays take when full."""
        arrays = (
            self._nbytes,
            self._created,
            self._last_hit,
            self._hits,
            self._cls,
            self._saves,
            self._parent,
        )
        return self._slots.nbytes + sum(a.itemsize * len(a) for a in arrays)

    def check_integrity(self) -> None:
        """Every entry is found under its name, counts agree. For tests; raises AssertionError."""
        entries = list(self.entries())
        assert len(entries) == len(self) == len({e.name for e in entries})
        assert self.bytes == sum(e.nbytes for e in entries)
        self._slots.check()
        for e in entries:
            assert self.get(e.name) == e

    # --- inside ----------------------------------------------------------------------------------

    def _lookup(self, name: str) -> bool | None:
        if self._slots.find(name):
            return True
        until = self._gone.get(name)
        if until is not None:
            if self.clock() < until:
                return False
            del self._gone[name]
        return False if self.complete else None

    def _turn_after(self, slot: int, parent: int) -> int:
        """Turn of a new chunk: its parent's, plus one where the parent had been hit, i.e. an earlier request ended there.

        The first chunks of a chain (a system prompt, hit by everybody) start no turn.
        """
        above = self._slots.find_fragment(self._slots.prefix[slot], parent) if parent else 0
        if not above:
            return 0
        begun = self._hits[above] and self._parent[above]
        return min(255, self._turn[above] + (1 if begun else 0))

    def _remove(self, name: str) -> bool:
        slot = self._slots.find(name)
        if slot:
            self._remove_slot(slot)
        return bool(slot)

    def _remove_slot(self, slot: int) -> None:
        self._slots.remove(slot)
        self.bytes -= self._nbytes[slot]

    def _forget_one(self) -> None:
        """Make room: of a few random entries, drop the one that earned least per byte since its last hit."""
        now, worst, worst_worth = self.clock(), 0, math.inf
        tries = 0
        while tries < _SAMPLE or not worst:
            slot = self._random.randrange(1, self._slots.top)
            tries += 1
            if self._slots.prefix[slot]:
                worth = (
                    (self._hits[slot] + 0.5)
                    * (self._saves[slot] or 1e-9)
                    / (self._nbytes[slot] or 1)
                    / (now - self._last_hit[slot] + 1)
                )
                if worth < worst_worth:
                    worst, worst_worth = slot, worth
        self._remove_slot(worst)
        self.counters["forgotten"] += 1
        self._complete_at = -math.inf  # from now on "not known" proves nothing

    def _class_id(self, cls: str) -> int:
        if cls not in self._classes:
            if len(self._classes) >= 255:  # more than anybody has: all further ones are the default class
                return self._class_id("") if "" in self._classes else 0
            self._classes.append("" if len(self._classes) == 254 else cls)
            return len(self._classes) - 1
        return self._classes.index(cls)

    def _entry(self, slot: int) -> Entry:
        return Entry(
            self._slots.name(slot), self._nbytes[slot], self._classes[self._cls[slot]], self._created[slot], self._last_hit[slot],
            self._hits[slot], self._saves[slot], self._parent[slot], self._turn[slot],
        )  # fmt: skip


def _sound(e: Entry) -> Entry:
    """The entry with every number in the range of its column."""
    if (
        0 <= e.nbytes <= _MAX_U32 and 0 <= e.created <= _MAX_U32 and 0 <= e.last_hit <= _MAX_U32 and 0 <= e.hits <= 65535
        and 0 <= e.saves <= _MAX_SAVES and 0 <= e.parent < 2**64 and 0 <= e.turn <= 255
    ):  # fmt: skip
        return e
    return e._replace(
        nbytes=_within(e.nbytes, _MAX_U32), created=_within(e.created, _MAX_U32), last_hit=_within(e.last_hit, _MAX_U32),
        hits=_within(e.hits, 65535), saves=min(max(e.saves, 0.0), _MAX_SAVES) if math.isfinite(e.saves) else 0.0,
        parent=e.parent if 0 <= e.parent < 2**64 else 0, turn=_within(e.turn, 255),
    )  # fmt: skip


def _within(value: float, most: int) -> int:
    return min(max(int(value), 0), most) if math.isfinite(value) else 0


def fragment(name: str | None) -> int:
    """First 8 bytes of the hash of a name (or of a bare hash), as the number that links chunks; 0 = none."""
    return int(name[-64:][:16], 16) if name else 0
