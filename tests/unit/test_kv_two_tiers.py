"""A directory before Blob: each tier keeps its own transports, names and verdicts of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.common.kv.keys import PUBLIC
from components.common.kv.store import KvStore
from tests.kvtools import kv
from tests.kvtools.fixtures import names, stored
from tests.kvtools.proxy import wait_for


def both(make: Any, root: Path) -> Any:
    scheduler = make(nvme_dir=str(root))
    assert [t.store for t in scheduler.manager.secondary_tiers] == ["posix", "blob"]
    return scheduler


def files(root: Path) -> list[Path]:
    return [p for p in root.rglob("*") if p.is_file() and len(p.name) == 64]


def test_both_store_and_the_directory_serves(make, proxy, store, container, tmp_path) -> None:
    scheduler, chunks = both(make, tmp_path), names(4)
    stored(scheduler, chunks)
    assert len(files(tmp_path)) == 4 and len(kv.chunks(store, container)) == 4
    scheduler.forget()
    before = len(proxy.seen)
    request = scheduler.request(chunks=chunks)
    assert scheduler.hit(request, chunks) == 4
    posix, blob = scheduler.manager.secondary_tiers
    assert posix.status()["ends"]["load_ok"] == 4 and "load_ok" not in blob.status()["ends"]
    assert not [s for s in proxy.seen[before:] if s.method == "GET" and f"/{container}/{PUBLIC}/" in s.path]


def test_what_the_directory_lost_comes_from_blob(make, tmp_path) -> None:
    scheduler, chunks = both(make, tmp_path), names(4)
    stored(scheduler, chunks)
    for path in files(tmp_path)[:2]:
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    for path in files(tmp_path)[2:]:
        path.unlink()
    scheduler.forget()
    request = scheduler.request(chunks=chunks)
    assert scheduler.hit(request, chunks) == 4
    posix, blob = scheduler.manager.secondary_tiers
    assert blob.status()["ends"]["load_ok"] == 4 and posix.status()["ends"].get("load_ok", 0) == 0


def test_a_purge_reaches_the_directory(make, store, container, tmp_path) -> None:
    """Names carry the tenant's generation: what was stored before is never looked up again, and is deleted by its worker."""
    tenant, other = "7" * 32, "8" * 32
    scheduler, chunks = both(make, tmp_path), names(3)
    stored(scheduler, chunks, tenant=tenant)
    stored(scheduler, names(2, "o"), tenant=other)
    assert len(files(tmp_path)) == 5
    scheduler.forget()
    control = KvStore(store.account(), container)
    control.raise_epoch(tenant)
    control.close()
    for tier in scheduler.manager.secondary_tiers:
        wait_for(
            lambda t=tier: (t._opened.scope(tenant, "0" * 32) or "").endswith("1"),
            20,
            f"{tier.store} knows of the purge",
        )
    request = scheduler.request(tenant=tenant, chunks=chunks)
    assert scheduler.hit(request, chunks) == 0
    wait_for(lambda: not (tmp_path / tenant).exists(), 30, "the files are gone")
    assert len(files(tmp_path / other)) == 2, "the other tenant's stay"
    stored(scheduler, names(2, "new"), tenant=tenant)
    assert len(files(tmp_path / tenant)) == 2, "of the new generation"
    posix = scheduler.manager.secondary_tiers[0]
    assert posix.status()["directory"]["deleted_purged"] == 3
