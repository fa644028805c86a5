"""The tier against a simple model: two engines, one store, damage and crashes between any two steps."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from components.common.kv.objects import HEADER_BYTES
from tests.kvtools import kv
from tests.kvtools.manager import Scheduler, data, key

PREFIXES = st.integers(0, 2)
LENGTHS = st.integers(1, 5)
ENGINES = st.integers(0, 1)


def chain(prefix: int, n: int) -> list[str]:
    return [f"m{prefix}.{i}" for i in range(n)]


class Tier(RuleBasedStateMachine):
    """`good`: chunks whose file is whole. An engine may hit less than that (bounded miss), never more, never other bytes."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="dynamo-blob-model-"))
        self.engines: list[Any] = [self.start(), self.start()]
        self.ever: set[str] = set()
        self.dram: list[set[str]] = [set(), set()]

    def start(self) -> Any:
        config = kv.settings(nvme_dir=str(self.root), staging_bytes=1 << 18, workers=1, load_deadline_s=5.0)
        return Scheduler(config, rows=24, events=False)

    def file(self, chunk: str) -> Path | None:
        return next(self.root.glob(f"*/*/*/{key(chunk)[:-4].hex()}"), None)

    @rule(engine=ENGINES, prefix=PREFIXES, n=LENGTHS, settle=st.booleans())
    def compute(self, engine: int, prefix: int, n: int, settle: bool) -> None:
        scheduler, chunks = self.engines[engine], chain(prefix, n)
        request = scheduler.request(chunks=chunks)
        got = scheduler.hit(request, chunks)
        self.check(scheduler, request, chunks[:got], engine)
        scheduler.put(request, chunks)
        self.dram[engine] |= set(chunks)
        self.ever |= set(chunks)
        scheduler.finish(request)
        if settle:
            scheduler.settle()

    def check(self, scheduler: Any, request: Any, hit: list[str], engine: int) -> None:
        rows = scheduler.rows(request, hit) if hit else []
        assert rows == [data(c) for c in hit], "a hit gave other bytes than were computed"
        assert set(hit) <= self.ever, "a hit on a chunk nobody computed"
        self.dram[engine] |= set(hit)

    @rule(engine=ENGINES)
    def forget(self, engine: int) -> None:
        self.engines[engine].forget()
        self.dram[engine].clear()

    @rule(engine=ENGINES, prefix=PREFIXES)
    def abort(self, engine: int, prefix: int) -> None:
        scheduler, chunks = self.engines[engine], chain(prefix, 5)
        request = scheduler.request(chunks=chunks)
        scheduler.scan(request, chunks)
        scheduler.step()
        scheduler.finish(request)

    @rule(engine=ENGINES)
    def crash(self, engine: int) -> None:
        """Whatever is under way is lost; the next engine starts on the same store."""
        self.engines[engine].__exit__()
        self.engines[engine] = self.start()
        self.dram[engine].clear()

    @rule(
        prefix=PREFIXES,
        at=st.integers(0, 4),
        how=st.sampled_from(["flip", "cut", "swap", "delete", "part"]),
        seed=st.integers(0, 99),
    )
    def damage(self, prefix: int, at: int, how: str, seed: int) -> None:
        path = self.file(f"m{prefix}.{at}")
        if path is None:
            return
        content = bytearray(path.read_bytes())
        if how == "flip":
            content[random.Random(seed).randrange(HEADER_BYTES + len(data("x")))] ^= 1 << seed % 8
        elif how == "cut":
            del content[random.Random(seed).randrange(len(content)) :]
        elif how == "swap":
            other = self.file(f"m{prefix}.{(at + 1) % 5}")
            content = bytearray(other.read_bytes()) if other else content
        if how == "delete":
            path.unlink()
        elif how == "part":
            path.rename(path.with_name(path.name + ".1.1.part"))
        else:
            path.write_bytes(content)

    @invariant()
    def sound(self) -> None:
        for scheduler in getattr(self, "engines", []):
            scheduler.tier._opened.pool.check_integrity()

    def teardown(self) -> None:
        for scheduler in getattr(self, "engines", []):
            scheduler.settle()
            assert scheduler.tier._opened.pool.free == scheduler.tier._opened.pool.count, "slots leaked"
            assert scheduler.tier._jobs == {} and not scheduler.tier._storing
            scheduler.__exit__()
        if hasattr(self, "root"):
            shutil.rmtree(self.root, ignore_errors=True)


@pytest.mark.slow
def test_tier_against_its_model() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        Tier, settings=settings(max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=checks)
    )
