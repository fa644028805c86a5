"""How `bench crossover` judges what it measured."""

from __future__ import annotations

from typing import Any

from bench.crossover import faster, judge, last_wrong, unlearned


def record(tokens: int, load: float, recompute: float, auto: float, loaded: int) -> dict[str, Any]:
    return {"cell": "c", "tokens": tokens, "load": load, "recompute": recompute, "auto": auto, "auto_loaded": loaded}


def test_only_clear_cells_are_judged_and_by_their_medians() -> None:
    records = [
        record(1024, 1.0, 2.0, 1.1, 1024), record(1024, 3.0, 2.0, 2.0, 0), record(1024, 1.0, 2.0, 1.0, 896),
        record(2048, 1.0, 1.2, 1.0, 2048),
    ]  # fmt: skip
    assert faster(records) == {("c", 1024): "load"}
    verdict = judge(records)
    assert (verdict["decisions"], verdict["right"]) == (3, 2)
    assert verdict["ratio_low"] <= verdict["ratio_median"] == (1.0 + 1.0) / 2 <= verdict["ratio_high"]


def test_a_change_took_as_many_requests_as_the_last_wrong_decision() -> None:
    learned = [(512, True), (1024, True), (512, False), (1024, False), (512, True)]
    assert last_wrong(learned, {512: "load", 1024: "recompute"}) == 3
    assert last_wrong(learned, {1024: "recompute"}) == 2
    assert last_wrong(learned, {}) == 0


def test_a_change_is_learned_when_the_last_three_decisions_that_tell_are_right() -> None:
    clear = {512: "load"}
    late = [(512, False), (1024, True)] * 9 + [(512, True), (1024, True)]
    assert unlearned(late, clear), "nine of ten were wrong, the last by number is not in a clear cell"
    assert not unlearned([(512, False)] * 5 + [(512, True)] * 3, clear)
    assert unlearned([(1024, True)] * 20, clear), "nothing tells"
