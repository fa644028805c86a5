"""Purge generations in the store: read, raised, and found again when their object is lost or damaged.

    _control/epochs.json        {format, generations: {tenant: generation}}
    _control/epochs.copy.json   the same, written before the original: never behind it
    _control/purges/<...>.json  what purges said of themselves: each names its tenant and a generation

A generation that went back would make purged data reachable again, so an object that is not there is not read as
"never purged": the first reader of a graph writes it, and one that is lost, truncated or altered later is restored
from the copy, or from the purges where there is no copy either. Whoever notices restores, by compare-and-swap. What
cannot be restored is KV-EPOCHS-INVALID: workers then use no Blob tier (misses, no hits), and nothing is purged.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import TYPE_CHECKING, Any

from components.common.errors import DynamoBlobError
from components.common.kv.epochs import EPOCHS_OBJECT, FORMAT, MAX_GENERATION

if TYPE_CHECKING:
    from components.common.kv.store import KvStore

log = logging.getLogger(__name__)

COPY_OBJECT = "_control/epochs.copy.json"
PURGES = "_control/purges/"
_TENANT = re.compile(r"^[0-9a-f]{32}$")
_STATE = re.compile(rf"^{PURGES}([0-9a-f]{{32}})\.json$")
_FORMATS = re.compile(rb'"format":\s*"dynamo-blob\.epochs/(?!1")')
_TRIES = 8
_UNSEEN = 16
"""Without a copy: purges of one tenant at the same time share one state, so it may name less than was raised."""


def encode(generations: dict[str, int]) -> bytes:
    return json.dumps({"format": FORMAT, "generations": generations}, sort_keys=True).encode()


def parse(raw: bytes) -> dict[str, int]:
    """{tenant: generation}. Raises ValueError with why not."""
    try:
        body = json.loads(raw)
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']!r}, not {FORMAT!r}")
        return {_tenant(t): _generation(g) for t, g in body["generations"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{type(e).__name__}: {e}"[:300]) from None


def read(store: KvStore) -> tuple[dict[str, int], str]:
    """Generations and their ETag, restored first if they are lost. Raises StorageError, KV-EPOCHS-INVALID."""
    for attempt in range(_TRIES):
        raw, etag = store.read(EPOCHS_OBJECT)
        why = "it is not there"
        if raw is not None:
            try:
                return parse(raw), etag
            except ValueError as e:
                why = str(e)
            if _FORMATS.search(raw[:4096]):  # another version's: not ours to replace
                raise _invalid(store, why, EPOCHS_OBJECT, "another version of this program wrote it")
        found, source = _elsewhere(store, why)
        if store.swap(EPOCHS_OBJECT, encode(found), etag) and (raw is not None or found):
            log.warning("KV-EPOCHS-RESTORED: purge generations of %d tenants, from %s: %s", len(found), source, why)
        time.sleep(0.05 * attempt)
    raise _contended(store)


def raise_(store: KvStore, tenant: str, at_least: int = 0) -> int:
    """Raise a tenant's generation by one, and to `at_least`; the new one.

    Raises StorageError, KV-EPOCHS-CONTENDED, KV-EPOCHS-EXHAUSTED, KV-EPOCHS-INVALID.
    """
    for attempt in range(_TRIES):
        known, etag = read(store)
        generation = max(known.get(tenant, 0) + 1, at_least)
        if generation > MAX_GENERATION:
            raise DynamoBlobError(
                "KV-EPOCHS-EXHAUSTED", "no purge generation is left", where=_uri(store, EPOCHS_OBJECT)
            )
        raised = {**known, tenant: generation}
        if _write_copy(store, raised) is not None and store.swap(EPOCHS_OBJECT, encode(raised), etag):
            return generation
        time.sleep(0.05 * (attempt + 1))
    raise _contended(store)


def reconcile(store: KvStore) -> dict[str, int]:
    """`read`, and original and copy brought to the higher of each other: one that was put back to an older state is
    raised again, a missing copy is made. For the sweeper. Raises as `read` does."""
    known, etag = read(store)
    merged = _write_copy(store, known)
    if merged is None:
        return known  # somebody purges at this moment
    if merged != known and store.swap(EPOCHS_OBJECT, encode(merged), etag):
        log.warning("KV-EPOCHS-RESTORED: purge generations had gone back; raised to those of their copy")
    return merged


def _write_copy(store: KvStore, generations: dict[str, int]) -> dict[str, int] | None:
    """The higher of the copy's and these, now in the copy; None when others were faster."""
    raw, etag = store.read(COPY_OBJECT)
    copy = _or_none(raw)
    merged = dict(generations)
    for tenant, generation in (copy or {}).items():
        merged[tenant] = max(generation, merged.get(tenant, 0))
    if copy == merged or (raw is None and not merged):
        return merged
    return merged if store.swap(COPY_OBJECT, encode(merged), etag) else None


def _elsewhere(store: KvStore, why: str) -> tuple[dict[str, int], str]:
    """Generations without their object, and where they were found. Raises KV-EPOCHS-INVALID when they cannot be known."""
    copy = _or_none(store.read(COPY_OBJECT)[0])
    if copy is not None:
        return copy, COPY_OBJECT
    out: dict[str, int] = {}
    for info in store.list(store.control, PURGES):
        raw, _ = store.read(info.name)
        try:
            body = json.loads(raw or b"")
            tenant = _tenant(body.get("tenant_hash", body["tenant"]))
            generation = _generation(body["generation"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            if _STATE.match(info.name):  # a purge of this tenant went on, and nothing says how far it raised
                raise _invalid(store, why, info.name, f"{type(e).__name__}: {e}") from None
            continue
        if generation:
            out[tenant] = min(MAX_GENERATION, max(out.get(tenant, 0), generation + _UNSEEN))
    return out, PURGES


def _or_none(raw: bytes | None) -> dict[str, int] | None:
    try:
        return None if raw is None else parse(raw)
    except ValueError:
        return None


def _tenant(value: Any) -> str:
    if not isinstance(value, str) or not _TENANT.match(value):
        raise ValueError(f"{str(value)[:64]!r} is no tenant")
    return value


def _generation(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_GENERATION:
        raise ValueError(f"{str(value)[:64]!r} is no generation")
    return value


def _invalid(store: KvStore, why: str, name: str, doubt: str) -> DynamoBlobError:
    return DynamoBlobError(
        "KV-EPOCHS-INVALID", "the purge generations are lost", where=_uri(store, EPOCHS_OBJECT),
        why=f"{why}; {COPY_OBJECT} is no copy of them, and {name} cannot be read: {doubt}"[:600],
        do="restore one of the three (soft delete, versions); until then the Blob tier is not used and nothing is purged",
    )  # fmt: skip


def _contended(store: KvStore) -> DynamoBlobError:
    return DynamoBlobError(
        "KV-EPOCHS-CONTENDED", "others change the purge generations all the time",
        where=_uri(store, EPOCHS_OBJECT), do="try again",
    )  # fmt: skip


def _uri(store: KvStore, name: str) -> str:
    return store.account.uri(store.control, name)
