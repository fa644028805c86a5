"""How many ranges are in flight: full at once, less where the store asks for it or a range is late, more where that is faster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.standin import StandIn
from components.common.loading.fetch import Fetcher
from components.common.loading.inflight import InFlight
from components.common.loading.plan import RangeJob, Segment
from components.common.loading.report import Report
from components.common.storage.errors import StorageError
from components.common.storage.ranges import RangeReader
from tests.faults.releases import MiB, make_release, random_model, tensors_of, weights_config

RANGE = 8 * 2**20


class Link:
    """Ranges over a link that carries `rate(limit)` bytes per second; the clock is the link's."""

    def __init__(self, most: int, rate: Callable[[int], float]) -> None:
        self.now, self.rate = 0.0, rate
        self.gate = InFlight(most, clock=lambda: self.now)

    def ranges(self, count: int) -> list[int]:
        """The limit after each of `count` ranges."""
        limits = []
        for _ in range(count):
            assert self.gate.enter(lambda: True)
            self.now += RANGE / self.rate(self.gate.limit)
            self.gate.leave(RANGE)
            limits.append(self.gate.limit)
        return limits


def test_what_gains_nothing_is_not_kept() -> None:
    limits = Link(32, lambda limit: 1e9).ranges(400)
    assert limits[0] == 8, "full at once"
    assert max(limits) <= 12 and limits.count(8) > limits.count(12)


def test_a_gain_that_one_window_hid_is_found_later() -> None:
    hidden = iter([2e9] * 8)  # the first window flew by: one of 12 looks slower
    limits = Link(32, lambda limit: next(hidden, 1e8 * limit)).ranges(1200)
    assert limits[30] == 8
    assert max(limits[-100:]) == 32


def test_several_late_ranges_of_one_time_halve_it_once() -> None:
    link = Link(8, lambda limit: 1e9)
    link.now = 10.0
    for _ in range(8):
        link.gate.slower(began=9.0)
    assert link.gate.limit == 4
    link.gate.slower(began=10.0)
    assert link.gate.limit == 2
    for _ in range(5):
        link.gate.slower()
    assert link.gate.limit == 1


def test_ranges_that_were_late_together_are_not_all_sent_again_together() -> None:
    gate, lock, moving, most = InFlight(8), threading.Lock(), 0, {False: 0, True: 0}
    all_there = threading.Barrier(8)

    def reader() -> None:
        nonlocal moving
        assert gate.enter(lambda: False)
        for again in (False, True):
            with gate.transfer(again, lambda: False):
                with lock:
                    moving += 1
                    most[again] = max(most[again], moving)
                if not again:
                    all_there.wait(60)
                    gate.slower(began=0.0)  # all late
                time.sleep(0.05)
                with lock:
                    moving -= 1
            all_there.wait(60)
        gate.leave(RANGE)

    threads = [threading.Thread(target=reader) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert gate.limit == 4 and most == {False: 8, True: 4}


def test_a_late_range_halves_what_is_in_flight(tmp_path: Path) -> None:
    random_model(tmp_path / "model", [tensors_of(1, [MiB])])
    manifest = make_release(tmp_path / "store", tmp_path / "model")
    link = StandIn(tmp_path / "store", rate=MiB / 4).start()
    config = weights_config(link.url, tmp_path / "w", manifest, range_deadline_s=0.3, range_retries=0)
    file = next(f for f in manifest.files if f.path.endswith(".safetensors"))
    gate, reader = InFlight(8), RangeReader(config.account)
    fetcher = Fetcher(reader, "weights", Report(), retries=0, range_s=0.3, deadline=time.monotonic() + 60, gate=gate)
    job = RangeJob(file, 0, 0, file.size, file.ranges[0], Segment(file, 0, file.size, []))
    with pytest.raises(StorageError, match="TIMEOUT"):
        fetcher.fetch(job, memoryview(bytearray(file.size)))
    assert gate.limit == 4
    reader.close()
    link.close()
