"""Names of KV objects to slots of parallel arrays: open addressing without tombstones, 40 bytes a slot.

All of it is reserved at the start and touched as it fills; no rehash, so no pause. Not thread-safe: whoever owns the
other arrays (catalogue.py) has the lock.
"""

from __future__ import annotations

import math
from array import array

_EMPTY = 0


class Slots:
    """Slots 1 .. capacity; slot 0 stays unused. `prefix[slot]` = 0: the slot is free."""

    def __init__(self, capacity: int) -> None:
        size = 1 << max(4, math.ceil(math.log2(capacity * 1.5)))
        self._mask = size - 1
        self._table = array("I", bytes(4) * size)  # slot + 1; 0 = empty
        self.keys = bytearray(32 * (capacity + 1))
        self.prefix = array("I", bytes(4) * (capacity + 1))
        self.top = 1
        self._free: array[int] = array("I")
        self.count = 0
        self.prefixes: list[str] = [""]
        self.prefix_counts: list[int] = [0]
        self._prefix_ids: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes the arrays take when full."""
        return len(self.keys) + sum(a.itemsize * len(a) for a in (self._table, self.prefix))

    def find(self, name: str) -> int:
        """Slot of a name; 0 = not known."""
        prefix = self._prefix_ids.get(name[:65])
        if prefix is None:
            return 0
        try:
            key = bytes.fromhex(name[69:])
        except ValueError:
            return 0
        if len(key) != 32:
            return 0
        i = self._home(key, prefix)
        table, keys, prefixes = self._table, self.keys, self.prefix
        while t := table[i]:
            slot = t - 1
            if prefixes[slot] == prefix and keys[32 * slot : 32 * slot + 32] == key:
                return slot
            i = (i + 1) & self._mask
        return 0

    def find_fragment(self, prefix: int, fragment: int) -> int:
        """Slot whose hash begins with the 8 bytes `fragment` under the prefix of this number; 0 = not known."""
        key = fragment.to_bytes(8, "big")
        i = self._home(key, prefix)
        while t := self._table[i]:
            slot = t - 1
            if self.prefix[slot] == prefix and self.keys[32 * slot : 32 * slot + 8] == key:
                return slot
            i = (i + 1) & self._mask
        return 0

    def insert(self, name: str, key: bytes) -> int:
        """A slot for a name that has none; there must be room. `key`: its hash, 32 bytes."""
        slot = self._free.pop() if self._free else self.top
        self.top += slot == self.top
        prefix = self._intern(name[:65])
        self.keys[32 * slot : 32 * slot + 32] = key
        self.prefix[slot] = prefix
        self.prefix_counts[prefix] += 1
        i = self._home(key, prefix)
        while self._table[i]:
            i = (i + 1) & self._mask
        self._table[i] = slot + 1
        self.count += 1
        return slot

    def remove(self, slot: int) -> None:
        i = self._home(self.keys[32 * slot : 32 * slot + 32], self.prefix[slot])
        while self._table[i] != slot + 1:
            i = (i + 1) & self._mask
        # backward shift: no tombstones, so probes stay short for ever
        hole, j = i, (i + 1) & self._mask
        while t := self._table[j]:
            home = self._home(self.keys[32 * (t - 1) : 32 * t], self.prefix[t - 1])
            if (j - home) & self._mask >= (j - hole) & self._mask:
                self._table[hole], hole = t, j
            j = (j + 1) & self._mask
        self._table[hole] = _EMPTY
        self.prefix_counts[self.prefix[slot]] -= 1
        self.prefix[slot] = 0
        self._free.append(slot)
        self.count -= 1

    def name(self, slot: int) -> str:
        hash_ = self.keys[32 * slot : 32 * slot + 32].hex()
        return f"{self.prefixes[self.prefix[slot]]}/{hash_[:2]}/{hash_}"

    def check(self) -> None:
        """Counts agree. For tests; raises AssertionError."""
        assert sum(1 for t in self._table if t) == self.count == sum(self.prefix_counts)

    def _home(self, key: bytes | bytearray, prefix: int) -> int:
        return (int.from_bytes(key[:8], "little") ^ (prefix * 0x9E3779B97F4A7C15)) & self._mask

    def _intern(self, prefix: str) -> int:
        found = self._prefix_ids.get(prefix)
        if found is None:
            found = self._prefix_ids[prefix] = len(self.prefixes)
            self.prefixes.append(prefix)
            self.prefix_counts.append(0)
        return found
