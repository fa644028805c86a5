"""P6: a purge is provable: under load, under kill -9, against late puts; and what it must not touch stays."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common.errors import DynamoBlobError
from components.common.kv.epochs import Epochs, scoped
from components.common.kv.fence import Fence
from components.common.kv.purge import Purge, PurgeConfig, State, recoverable
from components.common.kv.store import PURGE_PREFIX, WORKERS_PREFIX, KvStore
from components.common.messages.salt import compose, tenant_hash
from components.common.messages.tenants import read_salt_key, rotate_salt_key
from components.common.registry.signing import SigningKey, verify
from components.common.storage.account import Account
from graphs.cli.purge import summary
from tests.kv_azurite import NAMESPACE, KvAzurite, free_port, name

KEY = SigningKey.generate()


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvAzurite]:
    server = KvAzurite(tmp_path_factory.mktemp("azurite"), free_port(21620))
    yield server
    server.close()


@pytest.fixture
def store(azurite: KvAzurite, request: pytest.FixtureRequest) -> Iterator[KvStore]:
    account = Account(azurite.account)
    control = "kv" + hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    for container in (control, control + "b"):
        account.ensure_container(container)
    kv = KvStore(account, control)
    yield kv
    kv.close()
    account.close()


def config(azurite: KvAzurite, store: KvStore, **kwargs: Any) -> PurgeConfig:
    plain = {
        "account": azurite.account, "control": store.control, "containers": (store.control, store.control + "b"),
        "tenant": "acme", "settle_s": 0.5,
    }  # fmt: skip
    return PurgeConfig(**{**plain, **kwargs})


def put(store: KvStore, blob: str, container: str = "") -> None:
    store.account.put(container or store.control, blob, b"x" * 100)


def there(store: KvStore, tenant: str = "acme") -> set[str]:
    return {i.name for c in ("", "b") for i in store.list(store.control + c, tenant_hash(tenant) + "/")}


def test_everything_of_the_tenant_goes_from_every_container_and_nothing_else(
    azurite: KvAzurite, store: KvStore
) -> None:
    for i in range(7):
        put(store, name("acme", i))
        put(store, name("acme", 100 + i), store.control + "b")
        put(store, name("other", i))
    put(store, f"{tenant_hash('acme')}/{NAMESPACE}/namespace.json")
    put(store, f"{tenant_hash('acme')}/stray")
    report = Purge(config(azurite, store), store, KEY).run()
    assert there(store) == set() and len(there(store, "other")) == 7
    assert (report["deleted"], report["deleted_bytes"], report["late"], report["generation"]) == (16, 1600, 0, 1)
    assert report["probe"]["clean"] and report["probe"]["asked"] > 0 and report["probe"]["pid"] != os.getpid()


def test_what_a_sweeper_deletes_first_is_still_asked_for_by_name(azurite: KvAzurite, store: KvStore) -> None:
    names = [name("acme", i) for i in range(3)]
    for blob in names:
        put(store, blob)

    def step(phase: str, _: State) -> None:
        if phase == "delete":
            assert store.delete(store.control, names).deleted == names

    report = Purge(config(azurite, store, settle_s=0), store, KEY, step=step).run()
    assert report["deleted"] == 0 and report["probe"]["clean"] and report["probe"]["asked"] == len(names)


def test_the_report_is_signed_and_any_change_shows(azurite: KvAzurite, store: KvStore) -> None:
    put(store, name("acme", 1))
    report = Purge(config(azurite, store), store, KEY).run()
    kwargs = {"kind": "PURGE", "what": "the purge report", "where": ""}
    assert verify(report, (KEY.public,), **kwargs) == KEY.public
    stored, _ = store.read(f"{PURGE_PREFIX}{report['id']}.report.json")
    assert json.loads(stored or b"") == report
    with pytest.raises(DynamoBlobError, match="BAD-SIGNATURE"):
        verify({**report, "deleted": 2}, (KEY.public,), **kwargs)


def test_a_put_in_flight_that_lands_after_the_deletion_is_deleted_and_was_never_reachable(
    azurite: KvAzurite, store: KvStore
) -> None:
    epochs = Epochs(store.read_epochs, refresh_s=1, stale_s=600)
    assert epochs.refresh()
    old = epochs.scope(tenant_hash("acme"), NAMESPACE)
    assert old == scoped(NAMESPACE, 0)
    put(store, name("acme", 1))

    def step(phase: str, _: State) -> None:
        if phase == "settle":  # deleted already; a put that began before the purge lands now
            put(store, name("acme", 2))

    report = Purge(config(azurite, store), store, KEY, step=step).run()
    assert report["late"] == 1 and there(store) == set()
    assert epochs.current(tenant_hash("acme"), old)  # not read since
    assert epochs.refresh() and epochs.scope(tenant_hash("acme"), NAMESPACE) == scoped(NAMESPACE, 1)
    assert not epochs.current(tenant_hash("acme"), old)


def test_a_writer_that_ignores_the_generation_makes_the_purge_fail_loudly(
    azurite: KvAzurite, store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the proof: objects under the old generation keep coming, so nothing may be claimed."""
    monkeypatch.setattr("components.common.kv.purge._ROUNDS", 2)
    stop = threading.Event()

    def rogue() -> None:
        n = 0
        while not stop.wait(0.05):
            n += 1
            put(store, name("acme", f"rogue{n}"))

    thread = threading.Thread(target=rogue)
    thread.start()
    try:
        with pytest.raises(DynamoBlobError, match="KV-PURGE-UNPROVEN"):
            Purge(config(azurite, store, settle_s=0), store, KEY).run()
    finally:
        stop.set()
        thread.join()
    report = Purge(config(azurite, store), store, KEY).run()  # the same purge, taken up again
    assert report["resumed"] == 1 and report["generation"] == 2 and there(store) == set()


WRITER = """
import json, sys, time
from components.common.kv.epochs import Epochs
from components.common.kv.store import KvStore
from components.common.storage.account import Account
from components.common.storage.config import AccountConfig
from components.common.messages.salt import tenant_hash
from tests.kv_azurite import NAMESPACE, name
account = Account(AccountConfig.model_validate_json(sys.argv[1])); control = sys.argv[2]
store = KvStore(account, control)
epochs = Epochs(store.read_epochs, refresh_s=0.2, stale_s=0.8).start()
t = tenant_hash("acme"); n = 0; last = {}
while True:
    ns = epochs.scope(t, NAMESPACE)
    if ns is None:
        time.sleep(0.01); continue
    g = int(ns[24:], 16)
    account.put(control, name("acme", n, generation=g), b"y" * 100)
    n += 1; last[g] = n
    print(json.dumps(last), flush=True)
"""


def test_under_load_of_another_worker_the_proof_holds_and_its_new_objects_stay(
    azurite: KvAzurite, store: KvStore
) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, azurite.account.model_dump_json(), store.control],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert writer.stdout
        for _ in range(20):  # it is putting
            assert writer.stdout.readline()
        report = Purge(config(azurite, store, settle_s=2.0), store, KEY).run()
        assert writer.poll() is None
        lines = [writer.stdout.readline() for _ in range(40)]
        assert lines[-1]
    finally:
        writer.kill()
        rest = writer.communicate()[0]
    counts = json.loads((rest.splitlines() or lines)[-1] if rest.strip().endswith("}") else lines[-1])
    assert report["deleted"] >= 20 and report["probe"]["newer"] > 0
    assert counts["0"] <= report["deleted"] and counts["1"] > 0  # it went over to the new generation by itself
    assert there(store) and all("/" + NAMESPACE[:24] + "00000001/" in n for n in there(store))


def killed_at(phase: str, plan: PurgeConfig) -> int:
    """Run a purge in a process that kills itself when `phase` begins; how it ended (negative = signal)."""
    pid = os.fork()
    if pid == 0:
        try:
            account = Account(plan.account)  # connections of its own
            Purge(
                plan,
                KvStore(account, plan.control),
                KEY,
                step=lambda p, _: os.kill(os.getpid(), signal.SIGKILL) if p == phase else None,
            ).run()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("phase", ["begin", "raise", "rotate", "delete", "deleted", "settle", "prove", "done"])
def test_killed_at_any_phase_the_next_call_finishes_it(
    azurite: KvAzurite, store: KvStore, tmp_path: Path, phase: str
) -> None:
    salt = tmp_path / "acme.salt"
    rotate_salt_key(salt)
    before = read_salt_key(salt)
    for i in range(5):
        put(store, name("acme", i))
        put(store, name("other", i))
    plan = config(azurite, store, salt_key_file=str(salt))
    assert killed_at(phase, plan) == -signal.SIGKILL
    put(store, name("acme", "late"))  # lands while nobody purges
    raised = store.read_epochs().get(tenant_hash("acme"), 0)
    put(store, name("acme", "since", generation=raised))  # written by workers that know of the first attempt
    report = Purge(plan, store, KEY).run()
    assert there(store) == set() and len(there(store, "other")) == 5
    assert report["probe"]["clean"] and report["salt_key"] == "rotated" and read_salt_key(salt) != before
    assert (report["resumed"], report["generation"]) == (0 if phase == "done" else 1, raised + 1)
    assert store.read_epochs() == {tenant_hash("acme"): report["generation"]}


def test_an_age_purge_that_was_killed_goes_by_the_age_asked_for_now(azurite: KvAzurite, store: KvStore) -> None:
    put(store, name("acme", "old"))
    time.sleep(2.2)
    assert killed_at("delete", config(azurite, store, older_than_s=86400)) == -signal.SIGKILL
    report = Purge(config(azurite, store, older_than_s=1), store, KEY).run()
    assert (report["resumed"], report["deleted"]) == (1, 1) and there(store) == set()
    put(store, name("acme", "old"))  # computed again since, under its old name
    assert Purge(config(azurite, store, older_than_s=86400), store, KEY).run()["probe"]["clean"]


def test_older_than_deletes_by_age_alone(azurite: KvAzurite, store: KvStore) -> None:
    put(store, name("acme", "old"))
    time.sleep(2.2)
    put(store, name("acme", "young"))
    report = Purge(config(azurite, store, older_than_s=2), store, KEY).run()
    assert there(store) == {name("acme", "young")} and report["deleted"] == 1
    assert report["generation"] == 0 and store.read_epochs() == {} and report["probe"]["newer"] == 1


def test_the_rotated_key_puts_memory_tiers_out_of_reach(azurite: KvAzurite, store: KvStore, tmp_path: Path) -> None:
    salt = tmp_path / "acme.salt"
    rotate_salt_key(salt)
    old = compose("acme", "standard", read_salt_key(salt), "")
    report = Purge(config(azurite, store, salt_key_file=str(salt)), store, KEY).run()
    new = compose("acme", "standard", read_salt_key(salt), "")
    assert old != new and old.tenant == new.tenant and "unreachable" in report["memory"]
    assert "NOT covered" in Purge(config(azurite, store), store, KEY).run()["memory"]


def test_two_purges_at_once_end_in_one_clean_state(azurite: KvAzurite, store: KvStore) -> None:
    for i in range(30):
        put(store, name("acme", i))
    reports: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: reports.append(Purge(config(azurite, store), store, KEY).run()))
        for _ in range(2)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(reports) == 2 and all(r["probe"]["clean"] for r in reports) and there(store) == set()


def test_a_purge_begun_while_another_of_the_tenant_runs_has_a_report_of_its_own(
    azurite: KvAzurite, store: KvStore
) -> None:
    plan, reports = config(azurite, store, settle_s=0), []

    def step(phase: str, _: State) -> None:
        if phase == "settle":
            reports.append(Purge(plan, store, KEY).run())

    reports.append(Purge(plan, store, KEY, step=step).run())
    stored = [store.read(f"{PURGE_PREFIX}{r['id']}.report.json")[0] or b"{}" for r in reports]
    assert [json.loads(s) for s in stored] == reports and [r["generation"] for r in reports] == [2, 1]
    assert all(r["probe"]["clean"] for r in reports)


def test_a_salt_key_that_cannot_be_replaced_is_refused_before_anything_is_changed(
    azurite: KvAzurite, store: KvStore
) -> None:
    put(store, name("acme", 1))
    with pytest.raises(
        DynamoBlobError, match="TENANTS-SALT-KEY-FIXED"
    ) as e:  # like a mounted Secret: no file can be made there
        Purge(config(azurite, store, salt_key_file="/proc/self/acme.salt"), store, KEY).run()
    assert "--keep-key" in e.value.do
    assert there(store) == {name("acme", 1)} and not list(store.list(store.control, "_")) and store.read_epochs() == {}
    assert Purge(config(azurite, store), store, KEY).run()["salt_key"] == "kept"


def test_a_salt_key_that_fails_to_be_replaced_after_all_is_replaced_by_the_next_call(
    azurite: KvAzurite, store: KvStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    salt = tmp_path / "acme.salt"
    rotate_salt_key(salt)
    before, plan = read_salt_key(salt), config(azurite, store, salt_key_file=str(salt), settle_s=0)

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("components.common.kv.purge.rotate_salt_key", full)
        with pytest.raises(DynamoBlobError, match="TENANTS-SALT-KEY-FIXED") as e:
            Purge(plan, store, KEY).run()
    assert "No space left" in e.value.why
    report = Purge(plan, store, KEY).run()
    assert (report["salt_key"], report["resumed"]) == ("rotated", 1) and read_salt_key(salt) != before


def test_an_object_computed_again_during_an_age_purge_is_not_one_that_stayed(
    azurite: KvAzurite, store: KvStore
) -> None:
    put(store, name("acme", "old"))
    time.sleep(2.2)

    def step(phase: str, _: State) -> None:
        if phase == "prove":  # deleted, and by now somebody computed it anew: by age, its name is the same
            put(store, name("acme", "old"))

    report = Purge(config(azurite, store, older_than_s=1), store, KEY, step=step).run()
    assert (report["deleted"], report["probe"]["newer"], report["probe"]["asked"]) == (1, 1, 1)


def test_a_worker_that_says_nothing_is_named_and_forgotten_once_it_is_long_dead(
    azurite: KvAzurite, store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = Fence(store, "dead"), Fence(store, "alive")
    for fence in (dead, alive):
        fence.register()
    alive.raised(tenant_hash("acme"), 1)
    assert alive.turn()
    report = Purge(config(azurite, store, settle_s=0), store, KEY).run()
    worker = {f: f.name.removeprefix(WORKERS_PREFIX).removesuffix(".json") for f in (dead, alive)}
    assert report["workers"]["confirmed"] == [worker[alive]] and list(report["workers"]["silent"]) == [worker[dead]]
    assert worker[dead] in summary(report) and store.account.find(store.control, dead.name), "it may only be cut off"
    alive.raised(tenant_hash("acme"), 2)
    assert alive.turn()
    monkeypatch.setattr("components.common.kv.purge.SILENT_S", -60.0)
    Purge(config(azurite, store, settle_s=0), store, KEY).run()
    assert [i.name for i in store.list(store.control, WORKERS_PREFIX)] == [alive.name]


def test_an_object_with_snapshots_goes_with_them_and_one_that_cannot_go_keeps_no_other(
    azurite: KvAzurite, store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.common.kv.purge._BATCH", 2)
    names = sorted(name("acme", i) for i in range(6))
    for blob in names:
        put(store, blob)
    store.account.blob(store.control, names[0]).create_snapshot()
    held = store.account.blob(store.control, names[1]).acquire_lease()
    with pytest.raises(DynamoBlobError, match="1 objects cannot be deleted"):
        Purge(config(azurite, store), store, KEY).run()
    assert there(store) == {names[1]}
    held.release()
    report = Purge(config(azurite, store), store, KEY).run()
    kept = store.account.container(store.control).list_blobs(
        name_starts_with=tenant_hash("acme"), include=["snapshots"]
    )
    assert (report["deleted"], report["resumed"]) == (6, 1) and list(kept) == []


@pytest.mark.parametrize(
    ("protection", "until"),
    [
        ({"known": True, "versioning": False, "soft_delete_days": 0}, 0),
        ({"known": True, "versioning": False, "soft_delete_days": 7}, 1000 + 7 * 86400),
        ({"known": True, "versioning": True, "soft_delete_days": 7}, -1),
        ({"known": False, "versioning": False, "soft_delete_days": 0}, -1),
    ],
)
def test_what_stays_recoverable_is_said(protection: dict[str, Any], until: float) -> None:
    assert recoverable(protection, 1000)["until"] == until


def test_a_worker_that_cannot_read_the_generations_neither_looks_up_nor_stores() -> None:
    now, good = [0.0], [True]

    def read() -> dict[str, int]:
        if not good[0]:
            raise OSError("no store")
        return {"t": 3}

    epochs = Epochs(read, refresh_s=1, stale_s=5, clock=lambda: now[0])
    assert epochs.scope("t", NAMESPACE) is None  # before the first read
    epochs.refresh()
    assert epochs.scope("t", NAMESPACE) == scoped(NAMESPACE, 3) and epochs.scope("u", NAMESPACE) == scoped(NAMESPACE, 0)
    good[0], now[0] = False, 4.9
    assert not epochs.refresh() and epochs.scope("t", NAMESPACE) == scoped(NAMESPACE, 3)
    now[0] = 5.0
    assert epochs.scope("t", NAMESPACE) is None and not epochs.current("t", scoped(NAMESPACE, 3))


def test_generations_never_go_back_in_a_process() -> None:
    answers = iter([{"t": 3}, {}])
    epochs = Epochs(lambda: next(answers), refresh_s=1, stale_s=5)
    epochs.refresh()
    epochs.refresh()
    assert epochs.generation("t") == 3


def test_a_clock_that_jumps_does_not_shorten_the_wait(
    azurite: KvAzurite, store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ahead, begun = time.time, [0.0], [0.0]

    def step(phase: str, _: State) -> None:
        if phase == "settle":
            ahead[0], begun[0] = 3600.0, time.monotonic()
        elif phase == "prove" and begun[0]:
            begun.append(time.monotonic())

    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    Purge(config(azurite, store, settle_s=1.5), store, KEY, step=step).run()
    assert begun[1] - begun[0] > 1.0
