"""The KV catalogue at 10^6 objects: memory, time per operation, time of a sweep's verdict, requests per object.

Times are CPU seconds of this process: the machine may be busy with others. Memory is what the process grew by
(resident), not what was asked for. Requests are those of two sweeps over a smaller store in Azurite, the first of which
lists it and deletes half: per object they do not depend on its size (a LIST per 5000 objects, a DELETE per deletion).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.report import Report
from components.common.kv.catalogue import Catalogue
from components.common.kv.classes import Classes
from components.common.kv.retention import Lru, ReuseModel, Worth, verdict
from components.common.kv.snapshot import decode, encode
from components.common.kv.store import KvStore
from components.common.kv.sweeper import Sweeper, SweeperConfig
from components.common.messages.tenants import RetentionClass
from tests.kvtools.azure import azurite

CONTAINER = "kv-bench"


def _rss() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def name(i: int) -> str:
    h = hashlib.sha256(i.to_bytes(8, "little")).hexdigest()
    return f"{'ab' * 16}/{'cd' * 16}/{h[:2]}/{h}"


def bench(report: Report, quick: bool) -> None:
    report.server = "requests per object: azurite; everything else: none"
    requests(report, 200 if quick else 2000)
    memory_and_time(report, quick)


def requests(report: Report, objects: int) -> None:
    """Requests per object of a sweep that lists everything and deletes half, and of the next one, which finds nothing to do."""
    with tempfile.TemporaryDirectory() as folder, azurite(Path(folder) / "azurite") as server:
        account = server.account()
        account.ensure_container(CONTAINER)
        names = ["/".join(("ab" * 16, "cd" * 12 + "0" * 8, *name(i).split("/")[2:])) for i in range(objects)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: account.put(CONTAINER, n, b"x" * 100), names))
        store = KvStore(account, CONTAINER)
        rule = RetentionClass(ttl_s=86400, max_ttl_s=86400, bytes=objects * 100 // 2)
        config = SweeperConfig(account=account.config, container=CONTAINER, most_deletes=objects)
        sweeper = Sweeper(config, store, Classes({"a": rule}, "a", CONTAINER))
        for sweep in ("first sweep, half of it deleted", "next sweep, nothing to do"):
            before, began = dict(store.requests), time.monotonic()
            assert sweeper.run_once()
            report.add(f"{objects} objects in Blob", f"{sweep}: wall", 0, time.monotonic() - began, "s")
            for kind, n in store.requests.items():
                report.add(f"{objects} objects in Blob", f"{sweep}: {kind}", 0, n - before[kind], "requests")
        assert sweeper.counters["deleted_budget"] == objects // 2
        sweeper.close()
        store.close()
        account.close()


def memory_and_time(report: Report, quick: bool) -> None:
    objects = 200_000 if quick else 1_000_000
    cell, now = f"{objects} objects", time.time()
    before = _rss()
    model = ReuseModel()
    catalogue = Catalogue(1 << (objects - 1).bit_length(), reuse=model, clock=lambda: now)
    began, chain = time.process_time(), None
    for i in range(objects):
        now += 0.01
        chain = name(i - 1) if i % 32 else None
        catalogue.note_put(name(i), 3_000_000, "a" if i % 3 else "b", 0.1, chain)
    report.add(cell, "put (with its name's hash)", 0, (time.process_time() - began) / objects * 1e6, "us")
    report.add(cell, "resident", 0, (_rss() - before) / objects, "bytes per object")
    known, unknown = (
        [name(i) for i in range(0, objects, objects // 10_000)],
        [name(i) for i in range(objects, objects + 10_000)],
    )
    for round_ in range(3 if quick else 5):
        for variant, names in (("hit", known), ("unknown", unknown)):
            began = time.process_time()
            catalogue.lookup_many(names)
            report.add(cell, f"lookup, {variant}", round_, (time.process_time() - began) / len(names) * 1e6, "us")
        began = time.process_time()
        for n in known:
            catalogue.note_hit(n)
        report.add(cell, "note_hit", round_, (time.process_time() - began) / len(known) * 1e6, "us")
        for policy in (Worth(model), Lru()):
            rule = RetentionClass(ttl_s=1e9, max_ttl_s=1e9, bytes=catalogue.bytes // 4)
            began = time.process_time()
            rows = catalogue.columns()
            found = verdict(rows, Classes({"a": rule, "b": rule}, "a", CONTAINER), policy, now)
            report.add(cell, f"verdict, {policy.name}", round_, time.process_time() - began, "s")
    report.note(f"the verdict would delete {len(found.rows)} of {len(rows.slot)} objects")
    del rows, found
    began = time.process_time()
    raw = encode(catalogue.entries(), {}, True)
    report.add(cell, "snapshot, write", 0, time.process_time() - began, "s")
    report.add(cell, "snapshot", 0, len(raw) / objects, "bytes per object")
    began = time.process_time()
    back = decode(raw)
    assert back is not None and len(back.entries) == objects
    report.add(cell, "snapshot, read", 0, time.process_time() - began, "s")
