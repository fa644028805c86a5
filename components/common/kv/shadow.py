"""Shadow check: hits recomputed in idle time and compared. Digests prove that an object is what was written;
this proves that what was written was right.

For a sampled hit the border of one loaded chunk is chosen and the prompt cut a few tokens behind it, so that
the next token's distribution depends on that chunk. Three short runs, alone in the engine:

    recompute   under a salt of its own: nothing hits, at no tier
    control     again under that salt: an HBM prefix hit at the same border (P3's control)
    hit         under the request's salt: the KV in question

`hit` must equal `control` within `band` (nats; 0 is reached alone in the batch, bf16 prefill in a busy batch needs a
little). Beyond it the check is run once more; if it fails again the chunk and all that follow it in the chain are
quarantined: out of reach of every worker at every tier (quarantine.py), and deleted from Blob.

An object is checked at its k-th hit in every k (k = 1 / rate, the place in the cycle by its name), so a wrong object is
found within `every` hits on it by one worker, at most `every` x workers in all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from components.common.kv.epochs import scoped
from components.common.kv.keys import is_tenant, object_name
from components.common.kv.store import NAMESPACES, KvStore

log = logging.getLogger(__name__)

Tops = dict[int, float]
"""Logprobs of the most likely next tokens: {token: logprob}."""

_BEHIND = 4  # tokens kept behind the border: a prefix hit never covers the whole prompt
_FLOOR = -12.0


class Engine(Protocol):
    """What the check needs of a worker's engine."""

    async def tops(self, ids: Sequence[int], salt: str, stored: bool) -> tuple[Tops, int]:
        """One greedy token: its top logprobs, and how many prompt tokens were not computed. `stored` False: nothing is put to Blob."""

    def idle(self) -> bool:
        """No request running or waiting."""


class Hit(NamedTuple):
    """A request that used cached KV: `cached` prompt tokens were not computed. `salt` as the engine was given it."""

    ids: tuple[int, ...]
    salt: str
    cached: int


class Condemned(NamedTuple):
    """A chain from its first wrong chunk on: `first` is its place in the prompt, `keys` the chunks' hashes."""

    hit: Hit
    first: int
    keys: list[bytes]


class Finding(NamedTuple):
    """Outcome of one check. `distance`: hit against control; `noise`: recompute against control. Nats."""

    border: int
    distance: float
    noise: float
    wrong: bool


class Sampler:
    """Decides which hits are checked: every object once in `every` hits. Bounded memory."""

    def __init__(self, every: int, capacity: int = 1 << 16) -> None:
        if every < 1:
            raise ValueError("every is 1 or more")
        self.every, self._capacity = every, capacity
        self._hits: OrderedDict[bytes, int] = OrderedDict()

    def due(self, key: bytes) -> bool:
        """Count one hit on a chunk (its hash); True when this one is to be checked."""
        count = self._hits.pop(key, int.from_bytes(key[:8], "big") % self.every) + 1
        self._hits[key] = count % self.every
        if len(self._hits) > self._capacity:
            self._hits.popitem(last=False)
        return count % self.every == 0


class ShadowChecker:
    """`note` each request that hit; `run` checks in idle time. All in one event loop.

    chunk_tokens  tokens of one object
    hashes        ids, salt -> hash of every full chunk of the prompt, in order (`chunk_hashes`)
    quarantine    called once a wrong chunk was found
    queue         hits waiting at most; the oldest is dropped and counted
    """

    def __init__(
        self,
        engine: Engine,
        chunk_tokens: int,
        hashes: Callable[[Sequence[int], str], list[bytes]],
        quarantine: Callable[[Condemned], Awaitable[None]],
        *,
        every: int = 50,
        band: float = 0.25,
        queue: int = 64,
    ) -> None:
        self._engine, self._chunk, self._hashes, self._quarantine = engine, chunk_tokens, hashes, quarantine
        self._sampler, self._band = Sampler(every), band
        self._waiting: deque[tuple[Hit, int]] = deque(maxlen=queue)
        self.counters: Counter[str] = Counter()
        self.worst_noise = 0.0
        self._condemned: set[bytes] = set()
        self.found: tuple[str, float] | None = None
        """Key of the newest wrong chunk and when it was found, Unix seconds."""

    def note(self, hit: Hit) -> None:
        """A request used cached KV; what is due of it is queued. Hashes the cached part of the prompt: about 20 us a block."""
        keys = self._hashes(hit.ids[: hit.cached], hit.salt)
        due = [i for i, key in enumerate(keys) if self._sampler.due(key)]
        self.counters["hits"] += len(keys)
        if due:  # the deepest: wrong content anywhere before it shows there too, and `_first_wrong` finds where
            self.counters["dropped"] += len(self._waiting) == self._waiting.maxlen
            self._waiting.append((hit, (due[-1] + 1) * self._chunk))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def run(self, stop: asyncio.Event, pause_s: float = 0.2) -> None:
        """Check while the engine is idle, until `stop`."""
        while not stop.is_set():
            if self._waiting and self._engine.idle():
                try:
                    await self.step()
                except Exception as e:  # an engine's or a store's: this hit stays unjudged, the check goes on
                    self.counters["failed"] += 1
                    log.warning("KV-SHADOW: a check failed: %s: %s", type(e).__name__, e)
            else:
                try:
                    await asyncio.wait_for(stop.wait(), pause_s)
                except TimeoutError:
                    continue

    async def step(self) -> Finding | None:
        """One check of the oldest waiting hit; None when there is none or it could not be judged."""
        if not self._waiting:
            return None
        hit, border = self._waiting.popleft()
        if self._condemned and not self._condemned.isdisjoint(self._hashes(hit.ids[:border], hit.salt)):
            return None  # it had begun before its chain was condemned
        finding = await self._check(hit, border)
        if (
            finding is not None
            and finding.wrong
            and (again := await self._check(hit, border)) is not None
            and again.wrong
        ):
            first = await self._first_wrong(hit, border)
            keys = self._hashes(hit.ids, hit.salt)[first:]
            self.counters["wrong"] += 1
            self.found = keys[0].hex(), time.time()
            self._condemned.add(keys[0])
            log.error(
                "KV-SHADOW-MISMATCH: chunk %d (%s) of salt %s differs from its recomputation by %.3g nats (band %.3g); "
                "%d chunks quarantined", first, keys[0].hex(), hit.salt[:32], again.distance, self._band, len(keys),
            )  # fmt: skip
            await self._quarantine(Condemned(hit, first, keys))
        return finding

    async def _check(self, hit: Hit, border: int) -> Finding | None:
        ids = hit.ids[: border + _BEHIND]
        if len(ids) <= border:
            ids = (*ids, *([ids[-1]] * _BEHIND))
        salt, began = f"shadow-{secrets.token_hex(8)}", time.monotonic()
        truth, cached = await self._engine.tops(ids, salt, False)
        control, again = await self._engine.tops(ids, salt, False)
        tops, used = await self._engine.tops(ids, hit.salt, True)
        self.counters["milliseconds"] += int((time.monotonic() - began) * 1e3)
        if cached or not used:  # the truth was not computed, or the KV in question is gone: nothing to judge
            self.counters["unjudged"] += 1
            return None
        self.counters["checked"] += 1
        noise = distance(truth, control) if again else 0.0
        self.worst_noise = max(self.worst_noise, noise)
        found = distance(control, tops)
        return Finding(border, found, noise, found > max(self._band, 4 * noise))

    async def _first_wrong(self, hit: Hit, border: int) -> int:
        """Index of the first chunk after which the distributions part: bisection, a few short runs."""
        low, high = 0, border // self._chunk - 1
        while low < high:
            middle = (low + high) // 2
            finding = await self._check(hit, (middle + 1) * self._chunk)
            if finding is None:
                return 0  # cannot tell: condemn the whole chain
            low, high = (low, middle) if finding.wrong else (middle + 1, high)
        return low


def distance(a: Tops, b: Tops) -> float:
    """Largest difference of logprobs over the tokens of either side that carry weight; a token one side lacks counts
    as that side's least."""
    if not a or not b:
        return math.inf
    least_a, least_b = min(a.values()), min(b.values())
    out = 0.0
    for token in a.keys() | b.keys():
        x, y = a.get(token), b.get(token)
        if x is None or y is None:
            there = x if x is not None else y
            assert there is not None
            out = max(out, there - (least_b if y is None else least_a), 0.0)
        elif max(x, y) > _FLOOR:
            out = max(out, abs(x - y))
    return out


def known_namespaces(store: KvStore) -> list[str]:
    """Digests of the namespaces that workers of any version noted in the store: the notes' names; what they say is
    not read, for another version may say it otherwise. A note of no such name is left alone, and told. Blocking I/O."""
    out = []
    for info in store.list(store.control, NAMESPACES):
        digest = info.name.removeprefix(NAMESPACES).removesuffix(".json")
        if is_tenant(digest):  # 32 hex digits, as a tenant
            out.append(digest)
        else:
            log.warning("KV-NAMESPACE-NOTE: %s is no note of a namespace; left alone", info.name)
    return out


def quarantine(
    store: KvStore,
    containers: Iterable[str],
    tenant: str,
    namespaces: Iterable[str],
    keys: Sequence[bytes],
    note_gone: Callable[[str, str], None],
    descendants: Callable[[str], list[str]] = lambda name: [],
) -> list[str]:
    """Delete the objects of `keys` and of everything below the first one, in every container and generation in force.

    namespaces   digests, as in names: `known_namespaces`
    `note_gone` tells this worker's index (and, by its journal, the others). Returns the names condemned. Blocking I/O.
    """
    generation = store.read_epochs().get(tenant, 0)
    names: dict[str, None] = {}
    for namespace in namespaces:
        for key in keys:
            name = object_name(tenant, scoped(namespace, generation), key)
            names[name] = None
            names.update(dict.fromkeys(descendants(name)))
    for name in names:  # first out of the index, then out of the store: nobody is sent there meanwhile
        note_gone(name, "quarantined")
    for container in containers:
        done = store.delete(container, names)
        for name, why in done.failed.items():
            log.error("KV-QUARANTINE: %s/%s is out of the index but could not be deleted: %s", container, name, why)
    return list(names)
