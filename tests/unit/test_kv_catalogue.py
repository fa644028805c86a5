"""The catalogue against a plain dict, its bounds, and what it must never do."""

from __future__ import annotations

import hashlib
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from components.common.kv.catalogue import Catalogue, Entry, fragment
from components.common.kv.snapshot import decode, encode

TENANTS = ["a" * 32, "b" * 32]


def name(n: int, tenant: str = TENANTS[0], namespace: str = "c" * 32) -> str:
    h = hashlib.sha256(str(n).encode()).hexdigest()
    return f"{tenant}/{namespace}/{h[:2]}/{h}"


class Machine(RuleBasedStateMachine):
    """Any order of puts, hits, losses and time: the catalogue agrees with a dict."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.catalogue = Catalogue(64, negative_s=10, complete_s=5, clock=lambda: self.now)
        self.model: dict[str, dict[str, float]] = {}
        self.gone: dict[str, float] = {}
        self.complete_at = -1e9

    @rule(target=names, n=st.integers(0, 40), tenant=st.sampled_from(TENANTS))
    def make(self, n: int, tenant: str) -> str:
        return name(n, tenant)

    @rule(n=names, nbytes=st.integers(0, 2**33), cls=st.sampled_from(["x", "y"]), saves=st.integers(0, 9))
    def put(self, n: str, nbytes: int, cls: str, saves: int) -> None:
        if n not in self.model and len(self.model) >= 64:
            return
        self.catalogue.note_put(n, nbytes, cls, saves)
        old = self.model.get(n)
        self.model[n] = {
            "nbytes": min(nbytes, 2**32 - 1), "hits": old["hits"] if old else 0, "saves": saves or (old["saves"] if old else 0),
            "created": old["created"] if old else int(self.now), "last": int(self.now),
        }  # fmt: skip
        self.gone.pop(n, None)

    @rule(n=names)
    def hit(self, n: str) -> None:
        self.catalogue.note_hit(n)
        if n in self.model:
            self.model[n]["hits"] += 1
            self.model[n]["last"] = int(self.now)

    @rule(n=names)
    def lose(self, n: str) -> None:
        self.catalogue.note_gone(n, "deleted")
        self.model.pop(n, None)
        self.gone[n] = self.now + 10

    @rule(s=st.floats(0.5, 20))
    def wait(self, s: float) -> None:
        self.now += s

    @rule()
    def list_all(self) -> None:
        self.catalogue.mark_complete()
        self.complete_at = self.now

    @rule(n=names)
    def look(self, n: str) -> None:
        if n in self.model:
            expected: bool | None = True
        elif self.gone.get(n, 0) > self.now or self.now - self.complete_at < 5:
            expected = False
        else:
            expected = None
        assert self.catalogue.lookup(n) is expected
        assert self.catalogue.lookup_many([n, n]) == [expected, expected]

    @invariant()
    def agrees(self) -> None:
        self.catalogue.check_integrity()
        found = {e.name: e for e in self.catalogue.entries()}
        assert found.keys() == self.model.keys()
        for n, m in self.model.items():
            e = found[n]
            assert (e.nbytes, e.hits, e.created, e.last_hit, e.saves) == (
                m["nbytes"], m["hits"], m["created"], m["last"], m["saves"],
            )  # fmt: skip
        rows = self.catalogue.columns()
        assert {rows.name(i) for i in range(len(rows.slot))} == set(self.model)
        assert rows.nbytes.sum() == self.catalogue.bytes


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_memory_is_bounded_at_capacity_and_overflow_is_counted() -> None:
    c = Catalogue(100)
    for n in range(1000):
        c.note_put(name(n), 10, "x", 1.0)
    assert len(c) == 100 and c.counters["forgotten"] == 900
    c.check_integrity()


def test_what_was_forgotten_is_unknown_not_absent() -> None:
    c = Catalogue(10)
    c.mark_complete()
    assert c.lookup(name(999)) is False
    for n in range(11):
        c.note_put(name(n), 10, "x", 1.0)
    lost = [n for n in range(11) if name(n) not in c]
    assert len(lost) == 1 and c.lookup(name(lost[0])) is None


def test_the_least_worth_of_the_sample_is_forgotten() -> None:
    now = [1000.0]
    c = Catalogue(50, clock=lambda: now[0])
    for n in range(50):
        c.note_put(name(n), 10, "x", 1.0)
        if n < 25:
            for _ in range(20):
                c.note_hit(name(n))
    for n in range(50, 70):
        c.note_put(name(n), 10, "x", 1.0)
    assert sum(name(n) in c for n in range(25)) >= 24  # the hit ones stay


def test_one_object_takes_at_most_80_bytes() -> None:
    assert Catalogue(2**20).nbytes_resident() / 2**20 <= 80


@pytest.mark.parametrize(
    "bad", ["", "x", "_control/epochs.json", name(1)[:-1], name(1).upper(), name(1) + "/x", "z" * 134]
)
def test_names_that_are_no_objects_are_ignored(bad: str) -> None:
    c = Catalogue(10)
    c.note_put(bad, 1, "x", 1.0)
    assert len(c) == 0 and c.counters["ignored"] == 1 and c.lookup(bad) is None


def test_one_key_under_two_tenants_is_two_objects() -> None:
    c = Catalogue(10)
    c.note_put(name(1, TENANTS[0]), 5, "x", 1.0)
    assert c.lookup(name(1, TENANTS[1])) is None
    c.note_put(name(1, TENANTS[1]), 7, "x", 1.0)
    c.note_gone(name(1, TENANTS[0]), "purged")
    assert c.lookup(name(1, TENANTS[1])) is True and c.bytes == 7


def test_descendants_are_the_whole_tree_below_and_nothing_else() -> None:
    c = Catalogue(100)
    tree = {1: None, 2: 1, 3: 2, 4: 2, 5: 4, 6: None, 7: 6}
    for n, parent in tree.items():
        c.note_put(name(n), 1, "x", 1.0, name(parent) if parent else None)
    assert set(c.descendants(name(2))) == {name(3), name(4), name(5)}
    assert c.descendants(name(7)) == []


def test_a_turn_begins_where_an_earlier_request_ended() -> None:
    c = Catalogue(100)
    for n, parent in [(1, None), (2, 1), (3, 2)]:
        c.note_put(name(n), 1, "x", 1.0, name(parent) if parent else None)
    assert c.get(name(3)).turn == 0  # type: ignore[union-attr]
    for n in (1, 2, 3):
        c.note_hit(name(n))
    c.note_put(name(4), 1, "x", 1.0, name(3))
    c.note_put(name(5), 1, "x", 1.0, name(4))
    assert [c.get(name(n)).turn for n in (4, 5)] == [1, 1]  # type: ignore[union-attr]
    c.note_put(name(6), 1, "x", 1.0, name(1))  # after a shared first chunk: a new conversation, no turn
    assert c.get(name(6)).turn == 0  # type: ignore[union-attr]


def test_threads_do_not_break_it() -> None:
    c = Catalogue(500)

    def work(seed: int) -> None:
        for i in range(3000):
            n = name((i * seed) % 700)
            (c.note_put(n, 3, "x", 1.0), c.note_hit(n), c.lookup(n))
            if i % 3 == 0:
                c.note_gone(n, "deleted")

    threads = [threading.Thread(target=work, args=(s,)) for s in (1, 3, 7, 11)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    c.check_integrity()


def test_a_snapshot_gives_back_every_entry_and_any_damage_gives_none() -> None:
    c = Catalogue(100)
    for n in range(50):
        c.note_put(name(n), n, "x", n / 7, name(n - 1) if n else None)
        c.note_hit(name(n // 2))
    raw = encode(c.entries(), {"j": 3}, True)
    back = decode(raw)
    assert back is not None and back.offsets == {"j": 3} and back.complete
    for old, new in zip(c.entries(), back.entries, strict=True):
        assert new._replace(saves=0) == old._replace(saves=0) and new.saves == pytest.approx(old.saves, rel=1e-5)
    assert all(decode(raw[:cut]) is None for cut in (0, 10, 60, len(raw) - 1))
    assert decode(raw[:80] + bytes([raw[80] ^ 1]) + raw[81:]) is None


def test_merging_never_goes_back() -> None:
    c = Catalogue(10)
    c.add(Entry(name(1), 5, "x", 100, 900, 7, 1.0, 0))
    c.add(Entry(name(1), 5, "x", 100, 200, 3, 0.0, fragment(name(0))))
    e = c.get(name(1))
    assert e is not None and (e.last_hit, e.hits, e.saves, e.parent) == (900, 7, 1.0, fragment(name(0)))
