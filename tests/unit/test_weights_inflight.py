"""How many ranges are in flight: full at once, less where the store asks for it or a range is late, more where that is faster."""

from __future__ import annotations

from collections.abc import Callable

from components.common.loading.inflight import InFlight

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
