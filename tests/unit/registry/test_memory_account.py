"""The account in memory and Azurite give the same answer to the same call, so what holds for one was shown for the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from components.common.errors import DynamoBlobError
from tests.memory_account import Blobs, MemoryAccount
from tests.registry_store import Registry


def outcome(call: Callable[[], object]) -> object:
    try:
        value = call()
    except DynamoBlobError as e:
        return e.code
    return value


@pytest.fixture(params=["memory", "azurite"])
def account(request: pytest.FixtureRequest, registry: Registry) -> tuple[object, str]:
    if request.param == "azurite":
        return registry.root, registry.layout.container
    memory = MemoryAccount(Blobs())
    memory.ensure_container(registry.layout.container)
    return memory, registry.layout.container


def test_create_read_replace(account: tuple[MemoryAccount, str]) -> None:
    a, c = account
    first = a.create(c, "x/y", b"hello")
    assert outcome(lambda: a.create(c, "x/y", b"other")) == "STORAGE-CONFLICT"
    assert a.get(c, "x/y") == b"hello" and a.get(c, "x/y", 1, 2) == b"el" and a.get(c, "x/y", 3, 100) == b"lo"
    assert outcome(lambda: a.get(c, "x/y", 9, 2)) == "STORAGE-RANGE"
    assert outcome(lambda: a.get(c, "nope")) == "STORAGE-NOT-FOUND" and a.find(c, "nope") is None
    assert outcome(lambda: a.get("no-such-box", "x")) == "STORAGE-NO-CONTAINER"
    info = a.find(c, "x/y")
    assert info and (info.name, info.size, info.etag) == ("x/y", 5, first)
    second = a.replace(c, "x/y", b"bye", etag=first)
    assert second != first and a.get_with_etag(c, "x/y") == (b"bye", second)
    assert outcome(lambda: a.replace(c, "x/y", b"late", etag=first)) == "STORAGE-PRECONDITION"
    assert outcome(lambda: a.replace(c, "nope", b"late", etag=first)) == "STORAGE-PRECONDITION"


def test_touch_and_delete_under_an_etag(account: tuple[MemoryAccount, str]) -> None:
    a, c = account
    old = a.create(c, "x", b"1")
    new = a.touch(c, "x", old, "mark")
    assert new != old and a.get(c, "x") == b"1"
    assert outcome(lambda: a.touch(c, "x", old, "mark")) == "STORAGE-PRECONDITION"
    assert outcome(lambda: a.delete(c, "x", etag=old)) == "STORAGE-PRECONDITION"
    a.delete(c, "x", etag=new)
    gone = {
        "STORAGE-NOT-FOUND",
        "STORAGE-PRECONDITION",
    }  # Azure says the first, Azurite the second: nobody may rely on either
    assert outcome(lambda: a.delete(c, "x", etag=new)) in gone
    assert outcome(lambda: a.touch(c, "x", new, "mark")) in gone


def test_blocks(account: tuple[MemoryAccount, str]) -> None:
    a, c = account
    assert a.staged(c, "b") == set()
    a.stage(c, "b", "MDA=", b"one")
    a.stage(c, "b", "MDE=", b"two")
    assert a.staged(c, "b") == {"MDA=", "MDE="} and a.find(c, "b") is None
    assert [i.name for i in a.list(c)] == []
    a.commit(c, "b", ["MDE=", "MDA="])
    assert a.get(c, "b") == b"twoone"
    a.stage(c, "b", "MDI=", b"three")
    assert outcome(lambda: a.commit(c, "b", ["MDI="])) == "STORAGE-CONFLICT"
    assert outcome(lambda: a.commit(c, "c", ["MDI="])) == "STORAGE-REQUEST"


def test_list_is_sorted_and_by_prefix(account: tuple[MemoryAccount, str]) -> None:
    a, c = account
    etags = {n: a.create(c, n, n.encode()) for n in ("b/2", "a", "b/10", "b")}
    assert [(i.name, i.size, i.etag) for i in a.list(c, "b/")] == [("b/10", 4, etags["b/10"]), ("b/2", 3, etags["b/2"])]


def test_append(account: tuple[MemoryAccount, str]) -> None:
    a, c = account
    assert outcome(lambda: a.append(c, "log", b"x", at=0)) == "STORAGE-NOT-FOUND"
    a.append_open(c, "log")
    a.append(c, "log", b"one", at=0)
    a.append_open(c, "log")
    assert outcome(lambda: a.append(c, "log", b"two", at=0)) == "STORAGE-PRECONDITION"
    a.append(c, "log", b"two", at=3)
    assert a.get(c, "log") == b"onetwo"
