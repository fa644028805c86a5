"""Retention on a virtual clock against a simple model, and what each policy must prefer."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.common.kv.catalogue import Catalogue
from components.common.kv.classes import Classes
from components.common.kv.replay import POLICIES, Clairvoyant, Request, Shape, bound, chunk_name, replay
from components.common.kv.retention import Lru, OldestFirst, Policy, ReuseModel, Worth, chain_rank, depths, verdict
from components.common.messages.tenants import RetentionClass

MAKE = {"worth": lambda: Worth(ReuseModel()), "lru": Lru, "ttl": OldestFirst}
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "hit", "gone", "wait", "sweep"]), st.integers(0, 12), st.integers(1, 60), st.sampled_from(["a", "b"])
    ),
    max_size=60,
)  # fmt: skip


def name(n: int) -> str:
    h = hashlib.sha256(str(n).encode()).hexdigest()
    return f"{'a' * 32}/{'b' * 32}/{h[:2]}/{h}"


class Simple:
    """What retention promises, written plainly: no arrays, no ranks."""

    def __init__(self, rules: dict[str, RetentionClass]) -> None:
        self.rules, self.objects = rules, {}

    def put(self, n: int, nbytes: int, cls: str, now: int) -> None:
        old = self.objects.get(n)
        self.objects[n] = {
            "bytes": nbytes, "cls": cls, "created": old["created"] if old else now, "last": now,
        }  # fmt: skip

    def hit(self, n: int, now: int) -> None:
        if n in self.objects:
            self.objects[n]["last"] = now

    def over(self, n: int, now: int) -> bool:
        o, rule = self.objects[n], self.rules[self.objects[n]["cls"]]
        return now >= min(o["last"] + rule.ttl_s, o["created"] + rule.max_ttl_s)

    def held(self, cls: str, but: set[int]) -> int:
        return sum(o["bytes"] for n, o in self.objects.items() if o["cls"] == cls and n not in but)


@pytest.mark.parametrize("policy", MAKE)
@settings(max_examples=80, deadline=None)
@given(events=EVENTS, budget=st.integers(0, 200), total=st.none() | st.integers(0, 300))
def test_ttl_and_budgets_hold_after_every_sweep_and_nothing_goes_without_need(
    policy: str, events: list[tuple[str, int, int, str]], budget: int, total: int | None
) -> None:
    rules = {
        "a": RetentionClass(ttl_s=50, max_ttl_s=120, bytes=budget),
        "b": RetentionClass(ttl_s=20, max_ttl_s=20, bytes=10**6),
    }
    now, chosen = 1000, MAKE[policy]()
    model = chosen.model if isinstance(chosen, Worth) else None
    catalogue, simple = Catalogue(64, reuse=model, clock=lambda: float(now)), Simple(rules)
    swept = now
    for what, n, amount, cls in events:
        if what == "put":
            catalogue.note_put(name(n), amount, cls, 0.1, name(n - 1) if n % 4 else None)
            simple.put(n, amount, cls, now)
        elif what == "hit":
            catalogue.note_hit(name(n))
            simple.hit(n, now)
        elif what == "gone":
            catalogue.note_gone(name(n), "deleted")
            simple.objects.pop(n, None)
        elif what == "wait":
            now += amount
        else:
            rows = catalogue.columns()
            if model is not None:
                model.expose(rows, now, swept)
            swept = now
            found = verdict(rows, Classes(rules, "a", "kv"), chosen, now, total_bytes=total)
            numbers = {name(i): i for i in range(13)}
            doomed = {numbers[rows.name(i)]: r for i, r in zip(found.rows.tolist(), found.reasons, strict=True)}
            expired = {i for i in simple.objects if simple.over(i, now)}
            assert {i for i, r in doomed.items() if r == "ttl"} == expired
            assert simple.held("a", set(doomed)) <= budget
            left = sum(simple.held(c, set(doomed)) for c in rules)
            assert total is None or left <= total
            smallest = min((simple.objects[i]["bytes"] for i, r in doomed.items() if r == "budget"), default=0)
            if smallest:  # needed: with the last one given up still there, a budget would be overrun
                biggest = max(simple.objects[i]["bytes"] for i, r in doomed.items() if r == "budget")
                assert simple.held("a", set(doomed)) + biggest > budget or (
                    total is not None and left + biggest > total
                )
            for i in doomed:
                catalogue.discard(name(i))
                del simple.objects[i]
        assert len(catalogue) == len(simple.objects) and catalogue.bytes == sum(
            o["bytes"] for o in simple.objects.values()
        )


def one_class(nbytes: float) -> Classes:
    return Classes({"x": RetentionClass(ttl_s=1e6, max_ttl_s=1e6, bytes=int(nbytes))}, "x", "kv")


def survivors(catalogue: Catalogue, policy: Policy, keep: int, now: float) -> set[str]:
    rows = catalogue.columns()
    gone = set(verdict(rows, one_class(keep), policy, now).rows.tolist())
    return {rows.name(i) for i in range(len(rows.slot)) if i not in gone}


def test_lru_keeps_the_most_recently_hit() -> None:
    now = [1000.0]
    c = Catalogue(64, clock=lambda: now[0])
    for n in range(10):
        now[0] += 1
        c.note_put(name(n), 1, "x", 1.0)
    now[0] += 1
    c.note_hit(name(0))
    assert survivors(c, Lru(), 3, now[0]) == {name(0), name(8), name(9)}


def test_without_evidence_worth_orders_as_lru_does() -> None:
    now = [1000.0]
    c = Catalogue(64, clock=lambda: now[0])
    for n in range(10):
        now[0] += 40
        c.note_put(name(n), 1, "x", 1.0)
    assert survivors(c, Worth(ReuseModel()), 3, now[0]) == {name(7), name(8), name(9)} == survivors(c, Lru(), 3, now[0])


def test_worth_prefers_the_model_whose_hits_save_more_per_byte() -> None:
    now = [1000.0]
    c = Catalogue(64, clock=lambda: now[0])
    for n in range(10):
        c.note_put(name(n).replace("b" * 32, ("c" if n % 2 else "d") * 32), 1, "x", 1.0 if n % 2 else 4.0)
    left = survivors(c, Worth(ReuseModel()), 5, now[0])
    assert len(left) == 5 and all("d" * 32 in n for n in left)


def test_worth_learns_that_a_class_is_never_read_again() -> None:
    now = [1000.0]
    model = ReuseModel()
    c = Catalogue(4096, reuse=model, clock=lambda: now[0])
    rule = RetentionClass(ttl_s=1e6, max_ttl_s=1e6, bytes=10**9)
    for step in range(40):
        now[0] += 60
        for n in range(10):
            c.note_put(name(1000 + 10 * step + n), 1, "bulk", 1.0)
            c.note_put(name(10 * step + n), 1, "chat", 1.0)
            if step:
                c.note_hit(name(10 * (step - 1) + n))
        model.expose(c.columns(), now[0], now[0] - 60)
    rows = c.columns()
    classes = Classes({"chat": rule, "bulk": rule}, "chat", "kv")
    gone = set(verdict(rows, classes, Worth(model), now[0], total_bytes=10).rows.tolist())
    kept = {rows.name(i) for i in range(len(rows.slot)) if i not in gone}
    assert kept == {name(390 + n) for n in range(10)}, "the chunks that the next turn will hit"
    gone = set(verdict(rows, classes, Lru(), now[0], total_bytes=10).rows.tolist())
    assert kept != {rows.name(i) for i in range(len(rows.slot)) if i not in gone}, "control: LRU keeps others too"


@pytest.mark.parametrize("policy", MAKE)
def test_a_chain_is_given_up_from_its_tail(policy: str) -> None:
    c = Catalogue(64, clock=lambda: 1000.0)
    for n in range(10):
        c.note_put(name(n), 1, "x", 1.0 + n, name(n - 1) if n else None)
    assert survivors(c, MAKE[policy](), 4, 1000.0) == {name(0), name(1), name(2), name(3)}


@given(st.lists(st.integers(-1, 40), max_size=40), st.data())
@settings(max_examples=200, deadline=None)
def test_a_parent_ranks_at_least_as_high_as_any_descendant(parents: list[int], data: st.DataObject) -> None:
    up = np.array([p if p < i else -1 for i, p in enumerate(parents)], dtype=np.int64)
    rank = np.array(data.draw(st.lists(st.floats(0, 1), min_size=len(up), max_size=len(up))))
    out, depth = chain_rank(rank, up), depths(up)
    expected = rank.copy()
    for i in reversed(range(len(up))):
        if up[i] >= 0:
            expected[up[i]] = max(expected[up[i]], expected[i])
    np.testing.assert_array_equal(out, expected)
    for i, p in enumerate(up.tolist()):
        assert depth[i] == (depth[p] + 1 if p >= 0 else 0)


def conversations(n: int = 60, turns: int = 4) -> list[Request]:
    out, fresh = [], 0
    for s in range(n):
        ids: list[str] = []
        for t in range(turns if s % 3 == 0 else 1):
            ids = [*ids, *(chunk_name("x", fresh + i) for i in range(3))]
            fresh += 3
            out.append(Request(1000.0 + s * 20 + t * 90, "x", tuple(ids)))
    return sorted(out, key=lambda r: r.at)


def test_the_oracle_is_never_beaten_and_an_endless_budget_makes_all_equal() -> None:
    requests, shapes = conversations(), {"x": Shape(100, 0.5)}
    for budget in (1500, 4000, 10**9):
        saved = {p: replay(requests, shapes, make(requests), budget).seconds_saved for p, make in POLICIES.items()}
        assert saved["oracle"] >= max(saved.values())
        assert budget < 10**9 or len(set(saved.values())) == 1
    assert replay(requests, shapes, Clairvoyant(requests), 10**9).seconds_saved == 0.5 * sum(
        3 * t for s in range(0, 60, 3) for t in range(4)
    )


@settings(max_examples=12, deadline=None)
@given(
    uses=st.lists(st.tuples(st.integers(0, 600), st.sampled_from("ab"), st.integers(0, 9)), min_size=2, max_size=60),
    budget=st.integers(0, 6),
)
def test_no_policy_saves_more_than_the_bound(uses: list[tuple[int, str, int]], budget: int) -> None:
    requests = [Request(float(at), c, (chunk_name(c, n),)) for at, c, n in sorted(uses)]
    shapes = {"a": Shape(1000, 1.0), "b": Shape(2000, 5.0)}
    most = bound(requests, shapes, budget * 1000.0)
    for make in POLICIES.values():
        assert replay(requests, shapes, make(requests), budget * 1000.0).seconds_saved <= most + 1e-6


def test_the_bound_is_reached_by_the_oracle_where_all_chunks_are_equal() -> None:
    """Of two chunks used in turn, one can be held; of the uses within a sweep every one is a hit."""
    requests = [Request(100.0 * n, "a", (chunk_name("a", n % 2),)) for n in range(20)]
    requests += [Request(1900.0 + n, "a", (chunk_name("a", 7),)) for n in (1, 2, 3)]
    shapes = {"a": Shape(1000, 1.0)}
    best = replay(requests, shapes, Clairvoyant(requests), 1000.0).seconds_saved
    assert best == 9 + 2 and bound(requests, shapes, 1000.0) == pytest.approx(best, rel=0.02)
    assert bound(requests, shapes, 2000.0) == pytest.approx(18 + 2)


def test_replay_counts_what_a_ttl_costs() -> None:
    requests, shapes = conversations(), {"x": Shape(100, 0.5)}
    long, short = (replay(requests, shapes, Lru(), 10**9, ttl_s=t) for t in (1000, 60))
    assert (
        short.seconds_saved < long.seconds_saved and short.held_gb_hours < long.held_gb_hours and short.deleted_ttl > 0
    )


@pytest.mark.parametrize("present", ["x", ""])
def test_classes_that_the_file_no_longer_has_share_the_budget_of_the_default_class(present: str) -> None:
    now = [1000.0]
    c = Catalogue(64, clock=lambda: now[0])
    for n in range(9):
        now[0] += 1
        c.note_put(name(n), 1, ("gone1", "gone2", present or "gone1")[n % 3], 1.0)
    assert survivors(c, Lru(), 4, now[0]) == {name(n) for n in (5, 6, 7, 8)}, (
        "four bytes in all, not four for each name"
    )
