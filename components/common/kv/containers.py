"""Every container that ever held KV of this graph: what a purge lists and a sweeper sweeps.

The tenants file names the containers of now. A class that is removed, renamed or made ephemeral leaves one behind
that no file names any more, so whoever puts into containers first writes them into one small object,

    _control/containers.json      {"containers": [...]}

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
_TRIES = 16


def known(store: KvStore) -> tuple[str, ...]:
    """Containers on record. Raises StorageError, or KV-CONTAINERS-INVALID (never read as none)."""
    return _read(store)[0]


def remember(store: KvStore, containers: Iterable[str]) -> tuple[str, ...]:
    """Put containers on record; all that are. Raises StorageError, KV-CONTAINERS-INVALID, KV-CONTAINERS-CONTENDED."""
    wanted = set(containers)
    for attempt in range(_TRIES):
        found, etag = _read(store)
        if wanted <= set(found):
            return found
        every = sorted({*found, *wanted})
        if store.swap(CONTAINERS_OBJECT, json.dumps({"format": FORMAT, "containers": every}).encode(), etag):
            return tuple(every)
        time.sleep(0.02 * (attempt + 1))
    raise DynamoBlobError(
        "KV-CONTAINERS-CONTENDED", "others change the record of containers all the time", where=store.account.uri(store.control, CONTAINERS_OBJECT),
        do="try again",
    )  # fmt: skip


def sweep_retired(
    store: KvStore, classes: Classes, delete: Callable[[str, list[tuple[str, str]]], bool], now: float, most: int
) -> bool:
    """Delete what is over in retired containers, `most` objects at most; and put the containers of now on record.

    delete(container, [(name, reason)]) as the sweeper deletes; False = the lease is lost, and so is this sweep.
    `now`: Unix seconds by the store's clock. Raises StorageError.
    """
    current = {*classes.containers().values(), store.control}
    ttl_s, left = classes.get(classes.default).ttl_s, most
    try:
        for container in remember(store, current):
            if container not in current:
                over = list(itertools.islice(_over(store, container, ttl_s, now), left))
                left -= len(over)
                if over and not delete(container, over):
                    return False
    except StorageError:
        raise
    except DynamoBlobError as e:  # a record that cannot be read: what classes of now hold is swept all the same
        log.warning("retired containers are not swept: %s", e)
    return True


def _over(store: KvStore, container: str, ttl_s: float, now: float) -> Iterator[tuple[str, str]]:
    generations: dict[str, int] | None = None
    for info in store.list(container):
        name = parse_name(info.name)
        if name is None:
            continue
        if generations is None:  # read after the first page: no name in it can be newer than they are
            generations = store.read_epochs()
        if generation_of(name.namespace) < generations.get(name.tenant, 0):
            yield info.name, "purged"
        elif info.modified + ttl_s <= now:
            yield info.name, "ttl"


def _read(store: KvStore) -> tuple[tuple[str, ...], str]:
    raw, etag = store.read(CONTAINERS_OBJECT)
    if raw is None:
        return (), ""
    try:
        body = json.loads(raw)
        if body["format"] != FORMAT or not all(isinstance(c, str) and c for c in body["containers"]):
            raise ValueError(f"format {body['format']!r}, or no list of names")
        return tuple(body["containers"]), etag
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise DynamoBlobError(
            "KV-CONTAINERS-INVALID", "the record of containers cannot be read", where=store.account.uri(store.control, CONTAINERS_OBJECT),
            why=str(e), do="restore the object (its containers, as JSON); while it is unreadable new workers put nothing and no purge begins",
        ) from None  # fmt: skip
