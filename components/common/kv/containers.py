"""Every container that ever held KV of this graph: what a purge lists and a sweeper sweeps.

The tenants file names the containers of now. A class that is removed, renamed or made ephemeral leaves one behind
that no file names any more, so whoever puts into containers first writes them into one small object,

    _control/containers.json      {"containers": [...]}
    _control/containers.copy.json the same, written before it: one that is lost is not taken for "none"

by ETag compare-and-swap; nothing is ever taken out of it. A worker puts nothing before that is done.

What lies in a container that no class names any more ("retired") is looked up by nobody, so no hit extends its life:
it goes `ttl_s` of the default class after its put, and counts for no budget meanwhile.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator

from components.common.errors import DynamoBlobError
from components.common.kv.classes import Classes
from components.common.kv.epochs import generation_of
from components.common.kv.keys import parse_name
from components.common.kv.store import CONTAINERS_OBJECT, KvStore
from components.common.storage.errors import StorageError

log = logging.getLogger(__name__)

FORMAT = "dynamo-blob.containers/1"
COPY_OBJECT = "_control/containers.copy.json"
_TRIES = 16


def known(store: KvStore) -> tuple[str, ...]:
    """Containers on record. Raises StorageError, or KV-CONTAINERS-INVALID (never read as none)."""
    return _read(store)[0]


def remember(store: KvStore, containers: Iterable[str]) -> tuple[str, ...]:
    """Put containers on record; all that are. Raises StorageError, KV-CONTAINERS-INVALID, KV-CONTAINERS-CONTENDED."""
    wanted = set(containers)
    for attempt in range(_TRIES):
        found, etag = _read(store)
        every = tuple(sorted({*found, *wanted}))
        if _copied(store, every):
            if etag and wanted <= set(found):
                return found
            if store.swap(CONTAINERS_OBJECT, _encode(every), etag):
                return every
        time.sleep(0.02 * (attempt + 1))
    raise DynamoBlobError(
        "KV-CONTAINERS-CONTENDED", "others change the record of containers all the time", where=store.account.uri(store.control, CONTAINERS_OBJECT),
        do="try again",
    )  # fmt: skip


def sweep_retired(
    store: KvStore,
    classes: Classes,
    delete: Callable[[str, list[tuple[str, str]]], bool],
    now: float,
    most: int,
    keep: Callable[[], object] = lambda: None,
) -> tuple[bool, str]:
    """Delete what is over in retired containers, `most` objects at most; and put the containers of now on record.

    delete(container, [(name, reason)]) as the sweeper deletes; False = the lease is lost, and so is this sweep.
    `now`: Unix seconds by the store's clock. `keep`: called now and then during a listing.
    Returns what `delete` said and why not all of it was done ("" = it was). Raises StorageError when the store is away.
    """
    current = {*classes.containers().values(), store.control}
    ttl_s, left, problem = classes.get(classes.default).ttl_s, most, ""
    try:
        recorded = remember(store, current)
    except StorageError:
        raise
    except DynamoBlobError as e:  # a record that cannot be read: what classes of now hold is swept all the same
        log.warning("retired containers are not swept: %s", e)
        return True, f"{e.code}: {e.why}"
    for container in recorded:
        if container in current:
            continue
        try:
            over = list(itertools.islice(_over(store, container, ttl_s, now, keep), left))
        except DynamoBlobError as e:
            if isinstance(e, StorageError) and not 400 <= e.status < 500:
                raise
            log.warning("a retired container is not swept: %s", e)  # no right, no such name: the others are
            problem = f"{container}: {e.code}: {e.why}"
            continue
        left -= len(over)
        if over and not delete(container, over):
            return False, problem
    return True, problem


def _over(
    store: KvStore, container: str, ttl_s: float, now: float, keep: Callable[[], object]
) -> Iterator[tuple[str, str]]:
    generations: dict[str, int] | None = None
    for info in store.each(container, keep):
        name = parse_name(info.name)
        if name is None:
            continue
        if generations is None:  # read after the first page: no name in it can be newer than they are
            generations = store.read_epochs()
        if generation_of(name.namespace) < generations.get(name.tenant, 0):
            yield info.name, "purged"
        elif info.modified + ttl_s <= now:
            yield info.name, "ttl"


def _encode(containers: Iterable[str]) -> bytes:
    return json.dumps({"format": FORMAT, "containers": list(containers)}).encode()


def _parse(raw: bytes) -> tuple[str, ...]:
    """Raises ValueError with why not."""
    try:
        body = json.loads(raw)
        names = body["containers"]
        if body["format"] != FORMAT or not isinstance(names, list) or not all(isinstance(c, str) and c for c in names):
            raise ValueError(f"format {body['format']!r}, or no list of names")
        return tuple(names)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"{type(e).__name__}: {e}"[:300]) from None


def _copied(store: KvStore, containers: tuple[str, ...]) -> bool:
    """See to it that the copy has these at least; False when others were faster. A damaged copy is written anew."""
    raw, etag = store.read(COPY_OBJECT)
    try:
        there = _parse(raw) if raw is not None else ()
    except ValueError:
        there = ()
    return set(containers) <= set(there) or store.swap(COPY_OBJECT, _encode(sorted({*there, *containers})), etag)


def _read(store: KvStore) -> tuple[tuple[str, ...], str]:
    """Those on record and the record's ETag; "" = it is not there, and its copy, if there is one, was read."""
    name, (raw, etag) = CONTAINERS_OBJECT, store.read(CONTAINERS_OBJECT)
    if raw is None:
        name, (raw, _) = COPY_OBJECT, store.read(COPY_OBJECT)
    if raw is None:
        return (), ""
    try:
        return _parse(raw), etag
    except ValueError as e:
        raise DynamoBlobError(
            "KV-CONTAINERS-INVALID", "the record of containers cannot be read", where=store.account.uri(store.control, name),
            why=str(e), do="restore the object (its containers, as JSON); while it is unreadable new workers put nothing and no purge begins",
        ) from None  # fmt: skip
