"""Claims of services that start at once: in every order of events one reads Blob and nobody waits in a circle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from components.common.loading.report import Report
from components.weights.peers import Peers, owner

NAMES = ("a", "b", "c")
DIGEST = "d" * 64


class Crowd:
    """Services whose questions are answered at once; what is interleaved is who asks whom when."""

    def __init__(self, index: int, names: tuple[str, ...]) -> None:
        wire: Any = None
        self.key = (DIGEST, index)
        self.peers = {n: Peers(n, names, wire, Report(), 1, 1.0) for n in names}
        self.answers: dict[str, dict[str, Any]] = {n: {} for n in names}
        self.waits: dict[str, str] = {}
        self.reads: list[str] = []

    def steps(self, name: str) -> list[Any]:
        me = self.peers[name]
        return [
            lambda: me._claim(self.key),
            *[lambda p=p: self.ask(name, p) for p in me.addresses],
            lambda: self.decide(name),
        ]

    def ask(self, name: str, peer: str) -> None:
        self.answers[name][peer] = self.peers[peer].claimed(name, *self.key, ready=False)

    def decide(self, name: str) -> None:
        having = self.peers[name]._decide(self.key, self.answers[name])
        if having:
            self.waits[name] = owner(having, *self.key)
        else:
            self.reads.append(name)


def orders(names: tuple[str, ...], each: int) -> Iterator[tuple[str, ...]]:
    """Every interleaving of `each` steps of every name."""

    def go(left: dict[str, int], done: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if not any(left.values()):
            yield done
        for n in names:
            if left[n]:
                yield from go({**left, n: left[n] - 1}, (*done, n))

    yield from go(dict.fromkeys(names, each), ())


def index_ranked(ranking: tuple[str, ...]) -> int:
    """A range for which the names rank so, the owner first."""
    return next(
        i
        for i in itertools.count()
        if owner(list(ranking), DIGEST, i) == ranking[0] and owner(list(ranking[1:]), DIGEST, i) == ranking[1]
    )


@pytest.mark.parametrize("ranking", [("a", "b"), ("b", "a"), ("a", "b", "c")], ids="".join)
def test_one_reads_and_nobody_waits_in_a_circle(ranking: tuple[str, ...]) -> None:
    """Two that had each told the other to go on waited for each other until the deadline (240 of 300 s)."""
    index = index_ranked(ranking)
    names = tuple(sorted(ranking))
    for order in orders(names, len(names) + 1):
        crowd = Crowd(index, names)
        steps = {n: iter(crowd.steps(n)) for n in names}
        for name in order:
            next(steps[name])()
        assert len(crowd.reads) == 1, (order, crowd.reads, crowd.waits)
        for name in crowd.waits:
            seen = {name}
            while name in crowd.waits:
                name = crowd.waits[name]
                assert name not in seen, ("a circle", order, crowd.waits)
                seen.add(name)
