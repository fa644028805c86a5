"""Quarantine: KV that was found wrong is out of reach of every worker, at every tier, whoever holds a copy.

A wrong object may have been loaded by others before it is found: a decode worker pulled it, another replica has it in
DRAM. Nobody knows where copies are, and memory in use cannot be emptied. So nothing is looked for: a *mark*, the engine's
hash of the first block that is wrong, goes into one object of the control container, every worker reads it every
`kv.epochs_refresh_s`, and a request whose prompt runs through a marked block is keyed under another salt from then on:

    cache salt  ->  cache salt + "~q" + first 16 hex digits of the mark

The same on every worker, so what is computed anew is shared again; hashes are chained, so all that follows the wrong
block is covered, also what nobody knew of; other prompts are not touched. What lies under the old keys is never asked
for again and is overwritten. The bound: `epochs_refresh_s` + one read after the finder wrote the mark. A request that
had begun by then ends as it began; what it leaves behind has the old keys.

A worker that cannot read the marks for `epochs_stale_s` may hold what is condemned: with the check on, it keys what
it computes under a salt of its own ("~s", nothing stored in Blob) until it can read again: a cold cache, no wrong answer.

    _control/quarantine.json   {format, tenants: {tenant: {root, blocks: [[index, hash], ...]}}}, ETag compare-and-swap

Bounded: at `MAX_MARKS` of a tenant they become one step of its `root`, which is part of the salt of all it asks ("~r").
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from components.common.errors import DynamoBlobError
from components.common.kv.chain import block_hashes
from components.common.kv.epochs import Epochs
from components.common.kv.keys import PUBLIC
from components.common.kv.store import KvStore
from components.common.messages import salt as salts

log = logging.getLogger(__name__)

QUARANTINE_OBJECT = "_control/quarantine.json"
FORMAT = "dynamo-blob.quarantine/1"
MAX_MARKS = 256
_ROUNDS = 8
_CAS_TRIES = 16


class Mark(NamedTuple):
    """First wrong block of a chain: its place in the prompt and the engine's hash of it, hex."""

    at: int
    block: str


class Marks(NamedTuple):
    """Everything condemned of one tenant."""

    root: int = 0
    blocks: frozenset[Mark] = frozenset()

    def merged(self, other: Marks) -> Marks:
        """A higher root has swallowed the marks below it."""
        if self.root != other.root:
            return max(self, other, key=lambda m: m.root)
        return Marks(self.root, self.blocks | other.blocks)

    def plus(self, mark: Mark) -> Marks:
        blocks = self.blocks | {mark}
        return Marks(self.root, blocks) if len(blocks) < MAX_MARKS else Marks(self.root + 1)


def owner(salt: str) -> str:
    """Tenant whose marks a salt comes under; salts of another shape come under nobody's, as unsalted traffic does."""
    found = salts.parse(salts.plain(salt))
    return found.tenant if found else PUBLIC


def suffix_of(marks: Marks, ids: Sequence[int], salt: str, block_tokens: int) -> str:
    """What the salt of a prompt gets: "" when nothing of it is condemned. Hashes blocks up to the deepest mark."""
    out = f"~r{marks.root:016x}" if marks.root else ""
    if not marks.blocks:
        return out
    deepest = max(m.at for m in marks.blocks) + 1
    for _ in range(_ROUNDS):
        chain = enumerate(block_hashes(ids[: deepest * block_tokens], salt + out, block_tokens))
        found = next((h.hex() for n, h in chain if Mark(n, h.hex()) in marks.blocks), "")
        if not found:
            return out
        out += f"~q{found[:16]}"  # condemned under this salt too? another round
    return out + private()


def private() -> str:
    """A suffix that nobody else has: nothing is shared under it."""
    return f"~s{secrets.token_hex(8)}"


def read_marks(store: KvStore) -> dict[str, Marks]:
    """{tenant: Marks}; empty before the first quarantine. Raises StorageError, or KV-QUARANTINE-INVALID (never read as empty)."""
    return _read(store)[0]


def condemn(store: KvStore, tenant: str, mark: Mark) -> Marks:
    """Mark a block for every worker. Raises StorageError, KV-QUARANTINE-INVALID or KV-QUARANTINE-CONTENDED. Blocking I/O."""
    for attempt in range(_CAS_TRIES):
        known, etag = _read(store)
        marks = known.get(tenant, Marks())
        if mark in marks.blocks:
            return marks
        known[tenant] = marks = marks.plus(mark)
        if store.swap(QUARANTINE_OBJECT, encode(known), etag):
            return marks
        time.sleep(0.05 * (attempt + 1))
    raise DynamoBlobError(
        "KV-QUARANTINE-CONTENDED", "others change the quarantine all the time", where=_uri(store), do="try again"
    )


def encode(known: Mapping[str, Marks]) -> bytes:
    tenants = {t: {"root": m.root, "blocks": sorted(map(list, m.blocks))} for t, m in known.items()}
    return json.dumps({"format": FORMAT, "tenants": tenants}, sort_keys=True).encode()


def _read(store: KvStore) -> tuple[dict[str, Marks], str]:
    raw, etag = store.read(QUARANTINE_OBJECT)
    if raw is None:
        return {}, ""
    try:
        body = json.loads(raw)
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']!r}, not {FORMAT!r}")
        return {str(t): _marks(m) for t, m in body["tenants"].items()}, etag
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise DynamoBlobError(
            "KV-QUARANTINE-INVALID", "the quarantine cannot be read", where=_uri(store), why=str(e),
            do="restore the object; deleting it forgets what was found wrong: restart the workers then",
        ) from None  # fmt: skip


def _marks(body: Mapping[str, Any]) -> Marks:
    blocks: Iterable[tuple[int, str]] = body["blocks"]
    return Marks(int(body["root"]), frozenset(Mark(int(n), bytes.fromhex(h).hex()) for n, h in blocks))


def _uri(store: KvStore) -> str:
    return store.account.uri(store.control, QUARANTINE_OBJECT)


class Quarantine:
    """The marks as one worker knows them, read in the background as purge generations are (`Epochs`).

    store, block_tokens   control container; tokens of an engine block
    refresh_s, stale_s    seconds between reads; without a good read after which `suffix` answers with a salt of its own
    closed                False: never a salt of its own (nobody checks, so nobody condemns)
    """

    def __init__(
        self, store: KvStore, block_tokens: int, *, refresh_s: float, stale_s: float, closed: bool = True
    ) -> None:
        self._store, self._block, self._closed = store, block_tokens, closed
        self._known: dict[str, Marks] = {}
        self._lock = threading.Lock()
        self._epochs = Epochs(self._refresh, refresh_s=refresh_s, stale_s=stale_s)
        self._own = ""
        self.resalted = 0

    def start(self, first_s: float = 3.0) -> Quarantine:
        """Read on in a thread; waits for the first read."""
        self._epochs.start()
        self._epochs.wait_first(first_s)
        return self

    def close(self) -> None:
        self._epochs.close()

    def look_now(self) -> None:
        self._epochs.look_now()

    def add(self, tenant: str, mark: Mark) -> None:
        """Known here at once; `condemn` tells the others."""
        self._merge(
            {tenant: Marks(0).plus(mark)} if tenant not in self._known else {tenant: self._known[tenant].plus(mark)}
        )

    @property
    def marks(self) -> int:
        """Marks and roots known."""
        return sum(len(m.blocks) + m.root for m in self._known.values())

    @property
    def cut_off(self) -> bool:
        """Whether the marks are too old to go by, and that matters."""
        return self._closed and self._epochs.generation("") is None

    def suffix(self, ids: Sequence[int], salt: str) -> str:
        """What to append to the salt of a request with this prompt. No I/O; hashes only when its tenant has marks."""
        if self.cut_off:
            self._own = self._own or private()
            return self._own
        self._own = ""
        marks = self._known.get(owner(salt))
        out = suffix_of(marks, ids, salt, self._block) if marks else ""
        self.resalted += bool(out)
        return out

    def _refresh(self) -> dict[str, int]:
        self._merge(read_marks(self._store))
        return {}

    def _merge(self, found: Mapping[str, Marks]) -> None:
        with self._lock:  # what was once known is never forgotten, whatever becomes of the object
            known = dict(self._known)
            for tenant, marks in found.items():
                before = known.get(tenant, Marks())
                known[tenant] = before.merged(marks)
                if known[tenant] != before:
                    log.error(
                        "KV-QUARANTINE: tenant %s: KV from %s on is not used any more%s", tenant,
                        ", ".join(sorted(m.block for m in known[tenant].blocks - before.blocks)) or "its beginning",
                        f" (root {known[tenant].root})" if known[tenant].root else "",
                    )  # fmt: skip
            self._known = known
