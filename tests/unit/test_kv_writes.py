"""Write amplification is bounded by a number of the configuration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.common.errors import DynamoBlobError
from components.common.kv.config import KvTiersConfig
from components.common.kv.writes import WriteBudget
from tests.kv_azurite import name

NAMES = [name("acme", i) for i in range(12)]
SLACK, SIZE = 3, 100


@given(st.lists(st.integers(0, 11), max_size=300), st.sampled_from([1.0, 1.25, 2.0, 5.0]))
def test_what_is_put_stays_within_the_bound_whatever_is_asked(asked: list[int], most: float) -> None:
    budget, put = WriteBudget(most, slack=SLACK, clock=lambda: 0.0), list[int]()
    for i in asked:
        new = i not in put
        admitted = budget.admit(NAMES[i], SIZE)
        assert admitted or not new, "a chunk never put before is always put"
        put += [i] * admitted
        assert len(put) <= most * len(set(put)) + SLACK
        assert budget.amplification == pytest.approx(len(put) / len(set(put)))
    assert budget.refused == len(asked) - len(put)


def test_a_working_set_larger_than_its_budget_is_not_written_for_ever() -> None:
    """Ten chunks evicted and computed again a hundred times: 1000 puts without the bound."""
    budget = WriteBudget(2.0, slack=SLACK, clock=lambda: 0.0)
    puts = sum(budget.admit(n, SIZE) for _ in range(100) for n in NAMES[:10])
    assert puts == 2 * 10 + SLACK
    free = WriteBudget(1e9, slack=SLACK, clock=lambda: 0.0)
    assert sum(free.admit(n, SIZE) for _ in range(100) for n in NAMES[:10]) == 1000, "control"


def test_the_past_is_forgotten_by_half_lives_and_memory_is_bounded() -> None:
    now = [0.0]
    budget = WriteBudget(2.0, slack=0, capacity=4, half_life_s=10, clock=lambda: now[0])
    for n in NAMES:
        assert budget.admit(n, SIZE)
    assert len(budget._put) == 4
    assert sum(budget.admit(NAMES[-1], SIZE) for _ in range(30)) == 12
    now[0] = 100.0  # ten half-lives: the twelve new ones of then buy nothing any more
    assert not budget.admit(NAMES[-1], SIZE)


def test_the_configuration_states_it() -> None:
    settings = {"dram_bytes": 1 << 20, "nvme_dir": "/nowhere"}
    assert KvTiersConfig.parse(settings, where="kv").write_amplification == 2.0
    with pytest.raises(DynamoBlobError, match="write_amplification"):
        KvTiersConfig.parse({**settings, "write_amplification": 0.5}, where="kv")
