"""The router hears of each chunk in a store once, and again when it is gone."""

from __future__ import annotations

from vllm.v1.kv_offload.base import Medium

from components.common.kv import announced
from components.common.kv.announced import Announced
from tests.kvtools.manager import key


def taken(a: Announced) -> list[tuple[str, bool]]:
    events = list(a.take())
    assert {e.medium for e in events} <= {Medium.STORAGE}
    names = {key(n): n for n in "abc"}
    return [(names[k], e.removed) for e in events for k in e.keys]


def test_once_until_it_is_gone() -> None:
    a = Announced(True)
    for name in "aabab":
        a.stored(key(name))
    assert taken(a) == [("a", False), ("b", False)] and taken(a) == []
    a.gone(key("c"))
    assert taken(a) == [], "what was never announced is not retracted"
    a.gone(key("a"))
    a.stored(key("a"))
    assert taken(a) == [("a", True), ("a", False)]
    a.forget()
    a.stored(key("b"))
    assert taken(a) == [("b", False)]


def test_nothing_is_kept_for_an_engine_that_publishes_nothing_and_memory_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(announced, "_REMEMBER", 10)
    a = Announced(False)
    for i in range(1000):
        a.stored(key(str(i)))
    assert taken(a) == [] and len(a._known) == 10
