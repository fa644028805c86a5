"""Quarantine: what one worker found wrong, no worker uses; what is computed anew is shared again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from components.common.engine.shadow import Shadow
from components.common.engine.tags import tier_params
from components.common.errors import DynamoBlobError
from components.common.kv import quarantine
from components.common.kv.chain import block_hashes, chunk_hashes
from components.common.kv.containers import remember
from components.common.kv.epochs import scoped
from components.common.kv.journal import JournalWriter
from components.common.kv.keys import PUBLIC, object_name
from components.common.kv.quarantine import QUARANTINE_OBJECT, Mark, Marks, Quarantine, condemn, read_marks, suffix_of
from components.common.kv.store import NAMESPACES, KvStore
from components.common.messages.salt import bare, compose, plain
from components.common.storage.account import Account
from tests.kv_azurite import KvAzurite, free_port

BLOCK = 4
PROMPT = list(range(100, 100 + 5 * BLOCK + 2))
ACME = compose("acme", "default", b"k" * 32, "")


def mark(at: int, ids: list[int] = PROMPT, salt: str = "") -> Mark:
    return Mark(at, list(block_hashes(ids, salt, BLOCK))[at].hex())


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    server = KvAzurite(tmp_path_factory.mktemp("azurite"), free_port(21680))
    account = Account(server.account)
    yield account
    account.close()
    server.close()


@pytest.fixture
def store(account: Account, request: pytest.FixtureRequest) -> Iterator[KvStore]:
    control = f"kv-{abs(hash(request.node.name)):x}"
    account.ensure_container(control)
    kv = KvStore(account, control, threads=1)
    yield kv
    kv.close()


def worker(store: KvStore, stale_s: float = 600.0, closed: bool = True) -> Quarantine:
    return Quarantine(store, BLOCK, refresh_s=0.05, stale_s=stale_s, closed=closed)


def eventually(done, what: str) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def test_chunk_hashes_are_those_of_the_last_blocks() -> None:
    blocks = list(block_hashes(PROMPT, "s", BLOCK))
    assert len(blocks) == 5 and chunk_hashes(PROMPT, "s", BLOCK, 2 * BLOCK) == [blocks[1], blocks[3]]


def test_another_worker_knows_within_a_refresh_and_both_go_the_same_new_way(store: KvStore) -> None:
    finder, other = worker(store).start(), worker(store).start()
    try:
        assert finder.suffix(PROMPT, str(ACME)) == other.suffix(PROMPT, str(ACME)) == ""
        found = mark(2, salt=str(ACME))
        finder.add(ACME.tenant, found)
        suffix = finder.suffix(PROMPT, str(ACME))
        assert suffix == f"~q{found.block[:16]}", "the finder itself at once"
        condemn(store, ACME.tenant, found)
        eventually(lambda: other.marks == 1, "the other worker reads it by itself")
        assert other.suffix(PROMPT, str(ACME)) == suffix, "the same on both: what is computed anew is shared"
        assert (
            other.suffix(PROMPT, "") == "" and other.suffix(PROMPT, str(compose("b", "default", b"k" * 32, ""))) == ""
        )
        assert (finder.resalted, other.resalted) == (1, 1)
    finally:
        finder.close()
        other.close()


def test_every_prompt_through_the_block_and_no_other() -> None:
    marks = Marks().plus(mark(2))
    assert suffix_of(marks, PROMPT, "", BLOCK)
    assert suffix_of(marks, [*PROMPT[: 3 * BLOCK], 1, 2, 3], "", BLOCK), "a branch that nobody knew of"
    assert not suffix_of(marks, PROMPT[: 3 * BLOCK - 1], "", BLOCK), "the block is not whole: nothing of it can hit"
    assert not suffix_of(marks, [1, *PROMPT[1:]], "", BLOCK) and not suffix_of(marks, PROMPT, "another", BLOCK)


def test_what_is_wrong_again_under_the_new_salt_is_set_apart_again() -> None:
    marks = Marks().plus(mark(2))
    first = suffix_of(marks, PROMPT, "", BLOCK)
    twice = suffix_of(marks.plus(mark(1, salt=first)), PROMPT, "", BLOCK)
    assert twice.startswith(first) and len(twice) == 2 * len(first)
    always = marks
    for _ in range(2 * quarantine._ROUNDS):
        now = suffix_of(always, PROMPT, "", BLOCK)
        if "~s" in now:
            break
        always = always.plus(mark(0, salt=now))
    assert suffix_of(always, PROMPT, "", BLOCK) != suffix_of(always, PROMPT, "", BLOCK), "in the end nothing is shared"
    assert plain(suffix_of(always, PROMPT, str(ACME), BLOCK) or "") == ""


def test_many_marks_become_one_root_which_covers_all_that_was() -> None:
    marks = Marks()
    for n in range(quarantine.MAX_MARKS):
        marks = marks.plus(mark(0, ids=[n] * BLOCK))
    assert marks == Marks(1), "bounded"
    assert suffix_of(marks, PROMPT, "", BLOCK) == f"~r{1:016x}", "nothing older is used by this tenant"
    assert Marks(0, frozenset({mark(1)})).merged(marks) == marks == marks.merged(Marks(0, frozenset({mark(1)})))


def test_two_that_condemn_at_once_are_both_heard(store: KvStore) -> None:
    found = [mark(n % 5, ids=[n, *PROMPT[1:]]) for n in range(6)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda m: condemn(store, PUBLIC, m), found))
    assert read_marks(store) == {PUBLIC: Marks(0, frozenset(found))}
    etag = store.read(QUARANTINE_OBJECT)[1]
    condemn(store, PUBLIC, found[0])
    assert store.read(QUARANTINE_OBJECT)[1] == etag, "known already: nothing is written"


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"[]", b"{", b'{"format": "other"}', b'{"format": "dynamo-blob.quarantine/1"}',
        b'{"format": "dynamo-blob.quarantine/1", "tenants": {"t": {"root": 0, "blocks": [[1, "zz"]]}}}',
    ],
)  # fmt: skip
def test_an_object_that_cannot_be_read_is_never_an_empty_quarantine(store: KvStore, raw: bytes) -> None:
    store.write(QUARANTINE_OBJECT, raw)
    with pytest.raises(DynamoBlobError) as e:
        read_marks(store)
    assert e.value.code == "KV-QUARANTINE-INVALID"
    with pytest.raises(DynamoBlobError):
        condemn(store, PUBLIC, mark(0))
    assert store.read(QUARANTINE_OBJECT)[0] == raw, "nor overwritten"


def test_what_was_known_is_never_forgotten(store: KvStore) -> None:
    condemn(store, PUBLIC, mark(1))
    q = worker(store)
    q._epochs.refresh()
    store.account.delete(store.control, QUARANTINE_OBJECT)
    q._epochs.refresh()
    assert q.marks == 1 and q.suffix(PROMPT, "")


def test_a_worker_that_cannot_read_uses_nothing_older_until_it_can(store: KvStore) -> None:
    now = [0.0]
    q, careless = worker(store, stale_s=5), worker(store, stale_s=5, closed=False)
    q._epochs._clock = careless._epochs._clock = lambda: now[0]
    assert q.cut_off and q.suffix(PROMPT, "").startswith("~s"), "before the first read"
    q._epochs.refresh()
    assert not q.cut_off and q.suffix(PROMPT, "") == ""
    store.write(QUARANTINE_OBJECT, b"damaged")
    now[0] = 4.9
    assert not q._epochs.refresh() and q.suffix(PROMPT, "") == ""
    now[0] = 5.0
    own = q.suffix(PROMPT, "")
    assert own.startswith("~s") and q.suffix([1, 2], "") == own, "one salt for as long as it lasts: its own KV is used"
    assert careless.suffix(PROMPT, "") == "", "control: where nobody checks, nothing is given up"
    store.account.delete(store.control, QUARANTINE_OBJECT)
    assert q._epochs.refresh() and q.suffix(PROMPT, "") == ""
    now[0] = 50.0
    assert q.suffix(PROMPT, "") not in ("", own), "and another the next time"


def test_kv_set_apart_stays_its_tenants_and_private_kv_is_nobodys() -> None:
    apart, private = f"~q{'a' * 16}~r{'b' * 16}", f"~q{'a' * 16}~s{'c' * 16}"
    for salt, tenant in ((str(ACME), ACME.tenant), ("", PUBLIC)):
        assert tier_params("prefill", {}, plain(salt + apart) or None, False)["tenant"] == tenant
        nobody = tier_params("prefill", {}, plain(salt + private) or None, False)
        assert (nobody["tenant"], nobody["kv_load_tiers"]) == ("", [])
        assert bare(salt + apart) == bare(salt + private) == salt, "the router goes by the request's own salt"


def test_notes_of_other_versions_keep_nothing_of_a_condemned_chain(store: KvStore) -> None:
    """What a worker of another release noted is not understood here; the chunk goes under its namespace as well."""
    digests, key = ["a" * 32, "b" * 32, "c" * 32], hashlib.sha256(b"wrong").digest()
    for digest, text in zip(digests, (b'{"weights_digest": "w", "of": "the future"}', b"\xff", b"[]"), strict=True):
        store.write(f"{NAMESPACES}{digest}.json", text)
    store.write(f"{NAMESPACES}README.md", b"hello")
    names = [object_name(PUBLIC, scoped(d, 0), key) for d in digests]
    for blob in names:
        store.account.put(store.control, blob, b"x")
    shadow = Shadow.__new__(Shadow)  # an engine is not needed to delete
    shadow._store, shadow._account = store, store.account
    remember(store, [store.control])
    shadow._journal = JournalWriter(store, "w-shadow")
    shadow._delete(PUBLIC, [key])
    assert [i.name for i in store.list(store.control) if not i.name.startswith("_")] == []
    assert store.read(f"{NAMESPACES}README.md")[0] == b"hello"
