"""Scheduler-thread time of one step in which a prompt of 10,000 chunks is looked up, by what is known of it.

vLLM's tiering manager and our tier without an engine: thread CPU time, so that other users of the machine add noise but no bias.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import Report
from components.common.kv.index import MemoryIndex
from tests.kvtools import kv
from tests.kvtools.azure import azurite, free_port, new_container
from tests.kvtools.proxy import FaultProxy, wait_for

CHUNKS = 10_000


def bench(report: Report, quick: bool) -> None:
    report.server = "azurite behind the fault proxy; store down = the proxy resets every connection"
    with (
        tempfile.TemporaryDirectory(prefix="dynamo-blob-bench-steps-") as name,
        azurite(Path(name) / "azurite") as store,
        FaultProxy(store.port, free_port()) as proxy,
    ):
        settings = kv.settings(
            store, port=proxy.port, container=new_container(store), breaker_errors=3, lookup_deadline_s=30.0
        )
        _steps(report, settings, proxy, 5 if quick else 20)
        proxy.heal()


def _steps(report: Report, settings: dict[str, Any], proxy: FaultProxy, rounds: int) -> None:
    from tests.kvtools.manager import Scheduler

    with Scheduler({**settings, "staging_bytes": 1 << 20}, rows=64) as scheduler:
        opened = scheduler.tier._opened
        wait_for(lambda: opened.scope("0" * 32, "0" * 32) is not None, 30, "purge generations are read")
        for variant in ("not known", "store down"):
            # an index that knows nothing: each chunk must be asked for, `lookup_window` at a time
            scheduler.tier._lookups._index = MemoryIndex()
            if variant == "store down":
                proxy.fault("reset")
                transport = opened.transport("default")
                for i in range(100):
                    if not transport.available(False):
                        break
                    few = [f"d{i}"]
                    scheduler.hit(scheduler.request(chunks=few), few)
                assert not transport.available(False)
            for r in range(rounds):
                chunks = [f"{variant}{r}.{i}" for i in range(CHUNKS)]
                request = scheduler.request(chunks=chunks)
                for step in ("first step", "second step"):
                    began = time.thread_time()
                    scheduler.scan(request, chunks)
                    scheduler.step()
                    report.add(
                        f"{CHUNKS} chunks, {step}",
                        variant,
                        r,
                        (time.thread_time() - began) * 1e3,
                        "ms of scheduler thread",
                    )
                asked = scheduler.tier._lookups.open
                assert (asked > 0) is (variant == "not known"), f"{variant}: {asked} chunks are being asked for"
                scheduler.finish(request)
                wait_for(lambda: (scheduler.step(), not scheduler.tier._lookups.open)[1], 60, "the questions end")
