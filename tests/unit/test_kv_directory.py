"""Files of a worker's own directory (NVMe): purge, TTL and age purges reach them; nothing else is touched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.kv.classes import Classes
from components.common.kv.directory import DirectoryIndex, Owners, Upkeep
from components.common.kv.epochs import Epochs
from components.common.kv.purge import Purge, PurgeConfig
from components.common.kv.store import PURGE_PREFIX, KvStore
from components.common.messages.salt import tenant_hash
from components.common.messages.tenants import RetentionClass
from components.common.registry.signing import SigningKey
from tests.kv_azurite import name
from tests.kvtools.azure import new_container, shared

DAY = 86400.0
RULES = {
    "short": RetentionClass(ttl_s=100, max_ttl_s=250, bytes=0), "long": RetentionClass(ttl_s=DAY, max_ttl_s=DAY, bytes=0),
    "never": RetentionClass(ttl_s=DAY, max_ttl_s=DAY, bytes=0, ephemeral=True),
}  # fmt: skip


def files(root: Path, tenant: str = "") -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob(f"{tenant}*/*/*/*") if len(p.name) == 64}


def write(root: Path, *blobs: str, at: float | None = None) -> None:
    for blob in blobs:
        path = root / blob
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100)
        if at is not None:
            os.utime(path, (at, at))


def upkeep(root: Path, now: Callable[[], float] = time.time, **more: Any) -> Upkeep:
    classes = Classes(RULES, "short", "kv")
    owners = {
        tenant_hash("acme"): "long",
        tenant_hash("keeper"): "long",
        tenant_hash("clinic"): "never",
        tenant_hash("gone"): "no such class",
    }
    return Upkeep(root, lambda: classes, lambda: owners, more.pop("index", DirectoryIndex()), clock=now, **more)


def known(**generations: int) -> Epochs:
    epochs = Epochs(lambda: {tenant_hash(t): g for t, g in generations.items()}, refresh_s=1, stale_s=60)
    assert epochs.refresh()
    return epochs


def test_what_a_worker_finds_at_its_start_goes_by_generation(tmp_path: Path) -> None:
    old, new, other = name("acme", 1, generation=1), name("acme", 1, generation=2), name("other", 1)
    write(tmp_path, old, new, other)
    part = tmp_path / f"{name('acme', 2, generation=1)}.1.2.part"
    part.parent.mkdir(exist_ok=True, parents=True)
    part.write_bytes(b"under way")
    one = upkeep(tmp_path, epochs=known(acme=2))
    one.look()
    assert files(tmp_path) == {new, other} and part.exists()
    late = name("acme", 3, generation=1)
    write(tmp_path, late)  # a put that was under way meanwhile
    one.look()
    assert files(tmp_path) == {new, other} and one.counters["deleted_purged"] == 2
    os.utime(part, (1, 1))
    one.look()
    assert not part.exists() and [p.name for p in (tmp_path / tenant_hash("acme")).iterdir()] == [new.split("/")[1]]


def test_while_generations_are_not_known_nothing_is_purged(tmp_path: Path) -> None:
    write(tmp_path, name("acme", 1))

    def lost() -> dict[str, int]:
        raise OSError("no store")

    epochs = Epochs(lost, refresh_s=1, stale_s=60)
    epochs.refresh()
    upkeep(tmp_path, epochs=epochs).look()
    assert files(tmp_path) == {name("acme", 1)}


def test_ttl_by_the_tenants_class_extended_by_hits_up_to_the_cap(tmp_path: Path) -> None:
    now, begun, index = [time.time()], time.time(), DirectoryIndex()
    short, hit, long, never, unknown = (
        name(t, n) for t, n in (("other", 1), ("other", 2), ("acme", 1), ("clinic", 1), ("gone", 1))
    )
    write(tmp_path, short, hit, long, never, unknown, at=begun)
    one = upkeep(tmp_path, lambda: now[0], index=index)
    one.look()
    assert files(tmp_path) == {short, hit, long, unknown}, "ephemeral goes at once"
    now[0] = begun + 90
    index.hits.append((hit, now[0]))
    one.look()
    now[0] = begun + 110
    one.look()
    assert files(tmp_path) == {hit, long}, "the class of a tenant that is not in the file is the default"
    for age in (150, 220):
        now[0] = begun + age
        index.hits.append((hit, now[0]))
        upkeep(tmp_path, lambda: now[0], index=index).look()  # another process: the hits are with the files
    assert files(tmp_path) == {hit, long}
    now[0] = begun + 251
    upkeep(tmp_path, lambda: now[0]).look()
    assert files(tmp_path) == {long}, "250 s at most, however often it is hit"


def test_a_date_in_the_future_is_set_right(tmp_path: Path) -> None:
    now = [time.time()]
    write(tmp_path, name("other", 1), at=now[0] + 10**7)
    one = upkeep(tmp_path, lambda: now[0])
    one.look()
    assert one.counters["redated"] == 1
    now[0] += 101
    one.look()
    assert files(tmp_path) == set()


def test_what_is_no_object_stays(tmp_path: Path) -> None:
    outside, tenant = tmp_path / "outside", tenant_hash("acme")
    root = tmp_path / "root"
    blob = name("acme", 1)
    write(outside, blob)
    stray = [f"{blob}.txt", f"{tenant}/note", "_control/namespaces/a.json", f"{tenant}/{'ab' * 16}/zz/{'f' * 64}"]
    write(root, *stray, at=1.0)
    (root / tenant_hash("clinic")).symlink_to(outside / tenant, target_is_directory=True)
    upkeep(root, epochs=known(acme=5, clinic=5)).look()
    assert all((root / s).exists() for s in stray) and (outside / blob).exists()


def test_an_age_purge_reaches_files_and_a_state_that_cannot_be_read_stops_nothing(tmp_path: Path) -> None:
    server = shared()
    control = KvStore(server.account(), new_container(server))
    old, young, other = name("acme", "old"), name("acme", "young"), name("keeper", "old")
    write(tmp_path, old, other, at=time.time() - 3600)
    write(tmp_path, young)
    index = DirectoryIndex()
    one = upkeep(tmp_path, index=index, control=control, epochs=known())
    for n in (old, other):
        index.hits.append((n, time.time()))
    one.look()
    assert old in files(tmp_path)
    plan = PurgeConfig(
        account=control.account.config, control=control.control, containers=(control.control,), tenant="acme", older_than_s=600,
        directories=("decode-0",),
    )  # fmt: skip
    assert "NOT proven" in Purge(plan, control, SigningKey.generate()).run()["directories"]["says"]
    one.look()
    assert files(tmp_path) == {young, other} and one.counters["deleted_age"] == 1
    control.write(f"{PURGE_PREFIX}{'0' * 32}.age.json", b"[[[")
    write(tmp_path, name("clinic", 1))
    fresh = upkeep(tmp_path, control=control)
    fresh.look()
    assert "age purges" in fresh.problem and fresh.counters["deleted_ttl"] == 1
    control.close()


def test_a_step_is_bounded_and_a_stop_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.common.kv.directory._STEP", 10)
    write(tmp_path, *(name("clinic", i) for i in range(95)))
    one = upkeep(tmp_path)
    rests: list[float] = []
    monkeypatch.setattr(one._stop, "wait", lambda s: bool(rests.append(s)) or len(rests) >= 9)
    one.look()
    assert len(rests) == 9 and len(files(tmp_path)) == 95 - 89


def test_owners_follow_the_file_and_keep_the_last_good_one(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    text = "tenants:\n  acme: {keys: ['%s'], salt_key_file: s, class: long}\nclasses:\n  long: {ttl_s: 1, max_ttl_s: 1, bytes: 0}\n  short: {ttl_s: 1, max_ttl_s: 1, bytes: 0}\ndefault_class: short\n"
    file.write_text(text % ("0" * 64))
    owners = Owners(str(file))
    assert owners() == {tenant_hash("acme"): "long"}
    file.write_text("{")
    assert owners() == {tenant_hash("acme"): "long"}
    file.write_text((text % ("0" * 64)).replace("class: long", "class: short"))
    assert owners() == {tenant_hash("acme"): "short"} and Owners("")() == {}


def test_a_later_age_purge_takes_nothing_back_from_an_earlier_one(tmp_path: Path) -> None:
    """The worker did not run meanwhile; the first report said that it deletes at its next start."""
    server = shared()
    control = KvStore(server.account(), new_container(server))
    old = name("acme", "old")
    write(tmp_path, old, at=time.time() - 3600)
    for age in (600, 9 * DAY):
        plan = PurgeConfig(
            account=control.account.config, control=control.control, containers=(control.control,), tenant="acme",
            older_than_s=age,
        )  # fmt: skip
        report = Purge(plan, control, SigningKey.generate()).run()
        assert abs(report["cutoff"] - (time.time() - age)) < 60
    control.write(f"{PURGE_PREFIX}{'0' * 32}.age.json", b"{}")  # the first of the list: it stops nobody behind it
    one = upkeep(tmp_path, control=control)
    one.look()
    assert files(tmp_path) == set() and one.counters["deleted_age"] == 1 and "age purges" in one.problem
    control.close()


def test_a_file_that_cannot_go_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sorted((name("acme", 1), name("other", 1)))
    write(tmp_path, first, second)
    stuck, real = tmp_path / first, Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self == stuck:
            raise PermissionError(13, "Permission denied", str(self))  # another user's folder
        real(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    one = upkeep(tmp_path, epochs=known(acme=1, other=1))
    one.look()
    assert files(tmp_path) == {first} and one.counters["failures"] == 1 and "Permission denied" in one.problem
