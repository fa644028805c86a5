"""The KV catalogue at 10^6 objects: memory, time per operation, time of a sweep's verdict, requests per object.

Times are CPU seconds of this process: the machine may be busy with others. Memory is what the process grew by (resident), not what was asked for. Requests are counted by the sweeper against an
embedded Azurite on a smaller store and do not depend on its size: one LIST per 5000 objects, one DELETE per object deleted.
"""

from __future__ import annotations

import hashlib
import os
import time

from bench.report import Report
from components.common.kv.catalogue import Catalogue
from components.common.kv.classes import Classes
from components.common.kv.retention import Lru, ReuseModel, Worth, verdict
from components.common.kv.snapshot import decode, encode
from components.common.messages.tenants import RetentionClass


def _rss() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def name(i: int) -> str:
    h = hashlib.sha256(i.to_bytes(8, "little")).hexdigest()
    return f"{'ab' * 16}/{'cd' * 16}/{h[:2]}/{h}"


def bench(report: Report, quick: bool) -> None:
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
            found = verdict(rows, Classes({"a": rule, "b": rule}, "a", "kv"), policy, now)
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
