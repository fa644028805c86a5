"""P6: retention classes that change, vanish or become ephemeral under running workers: nothing is forgotten in Blob."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.errors import DynamoBlobError
from components.common.kv import containers
from components.common.kv.containers import known, remember
from components.common.kv.explain import why_no_hits
from components.common.kv.keys import parse_name
from components.common.kv.purge import Purge, PurgeConfig
from components.common.kv.reload import Watched
from components.common.kv.store import CONTAINERS_OBJECT, KvStore
from components.common.kv.sweeper import Sweeper, SweeperConfig, run
from components.common.messages.salt import tenant_hash
from components.common.messages.tenants import TenantsFile
from components.common.registry.signing import SigningKey
from components.common.storage.account import Account
from tests.kv_azurite import name
from tests.kvtools import kv
from tests.kvtools.azure import new_container, shared
from tests.kvtools.manager import Scheduler
from tests.kvtools.proxy import wait_for

TENANT = tenant_hash("acme")
LIMIT_S = 90.0
RULE = {"ttl_s": 100, "max_ttl_s": 1000, "bytes": "1GiB"}


class Bed:
    """A tenants file, and the containers its classes may name."""

    def __init__(self, folder: Path, account: Account) -> None:
        self.file = folder / "tenants.yaml"
        self.home, self.long, self.new = (new_container(shared()) for _ in range(3))
        self.store = KvStore(account, self.home)
        self.write(long={"container": self.long})

    def write(self, **classes: dict[str, Any]) -> None:
        rules = {"std": RULE, **{n: {**RULE, **c} for n, c in classes.items()}}
        self.file.write_text(yaml.safe_dump({"classes": rules, "default_class": "std"}))

    def there(self) -> dict[str, int]:
        names = {"home": self.home, "long": self.long, "new": self.new}
        return {k: sum(parse_name(i.name) is not None for i in self.store.list(c)) for k, c in names.items()}

    def sweeper(self) -> Sweeper:
        return Sweeper(
            SweeperConfig(account=self.store.account.config, container=self.home, lease_s=15, relist_s=1e-3),
            self.store,
            Watched(str(self.file), self.home).classes,
        )

    def purge(self) -> dict[str, Any]:
        now = sorted(set(Watched(str(self.file), self.home).classes.containers().values()))
        config = PurgeConfig(account=self.store.account.config, control=self.home, containers=tuple(now), tenant="acme", settle_s=0)  # fmt: skip
        return Purge(config, self.store, SigningKey.generate()).run()


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    account = shared().account()
    bed = Bed(tmp_path, account)
    yield bed
    bed.store.close()
    account.close()


def test_a_running_worker_follows_the_file_and_a_purge_finds_every_container_it_ever_used(bed: Bed) -> None:
    worker = Scheduler(kv.settings(shared(), container=bed.home, tenants_file=str(bed.file), epochs_refresh_s=0.1))
    opened = worker.tier._opened
    wait_for(lambda: opened.epochs.generation(TENANT) == 0, LIMIT_S, "the generations are known")

    def put(chunk: str, request: Any = None) -> Any:
        request = request or worker.request(tenant=TENANT, cls="long", chunks=[chunk])
        worker.put(request, [chunk])
        worker.settle()
        return request

    put("a")
    assert bed.there() == {"home": 0, "long": 1, "new": 0}
    bed.write(long={"container": bed.new})
    wait_for(lambda: opened.container_of("long") == bed.new, LIMIT_S, "the renamed container is in force")
    begun = put("b")
    assert bed.there() == {"home": 0, "long": 1, "new": 1}

    bed.write(long={"container": "no-such-container"})
    wait_for(
        lambda: "STORAGE-NO-CONTAINER" in opened.problem,
        LIMIT_S,
        "a container that is not there does not come into force",
    )
    bed.file.write_text("classes: [")
    wait_for(lambda: "TENANTS-UNREADABLE" in opened.problem, LIMIT_S, "a broken file is said")
    assert any("tenants file" in line for line in why_no_hits(worker.tier.status()))
    put("c")
    assert bed.there() == {"home": 0, "long": 1, "new": 2}, "the last good one rules"

    bed.write(long={"container": bed.new, "ephemeral": True})
    wait_for(lambda: not opened.container_of("long") and not opened.problem, LIMIT_S, "the class is ephemeral")
    put("d")
    put("e", begun)  # a request that began before
    assert bed.there() == {"home": 0, "long": 1, "new": 2} and worker.tier.counts["store_dropped", "ephemeral"] == 2

    bed.write()  # and now it is gone: what still comes under its name is the default class's
    wait_for(lambda: opened.container_of("long") == bed.home, LIMIT_S, "the class is gone")
    put("f")
    assert bed.there() == {"home": 1, "long": 1, "new": 2}
    worker.__exit__()
    report = bed.purge()
    assert bed.there() == {"home": 0, "long": 0, "new": 0}
    assert report["deleted"] == 4 and set(report["probe"]["containers"]) == {bed.home, bed.long, bed.new}


def test_what_lies_in_a_container_no_class_names_is_swept_by_age_and_generation(bed: Bed) -> None:
    remember(bed.store, [bed.long])
    for i, container in enumerate((bed.home, bed.long, bed.long)):
        bed.store.account.put(container, name("acme", i), b"x")
    bed.store.account.put(bed.long, name("other", 1), b"x")
    bed.store.account.put(bed.long, "somebody's", b"x")
    bed.write()
    sweeper = bed.sweeper()
    assert sweeper.run_once() and bed.there() == {"home": 1, "long": 3, "new": 0}, "young, and not purged"
    bed.store.raise_epoch(TENANT)
    assert sweeper.run_once() and bed.there() == {"home": 0, "long": 1, "new": 0}
    late, sweeper._clock = sweeper._clock, lambda: late() + 101
    assert sweeper.run_once() and bed.there() == {"home": 0, "long": 0, "new": 0}
    assert (sweeper.counters["deleted_purged"], sweeper.counters["deleted_ttl"]) == (3, 1)
    assert bed.store.account.find(bed.long, "somebody's") is not None
    sweeper.close()


def test_a_running_sweeper_follows_the_file_and_says_when_it_is_broken(bed: Bed, tmp_path: Path) -> None:
    bed.store.account.put(bed.home, name("acme", 1), b"x")
    status, stop = tmp_path / "sweeper.json", threading.Event()
    config = SweeperConfig(
        account=bed.store.account.config, container=bed.home, tenants_file=str(bed.file), lease_s=15, sweep_s=0.1, status_file=str(status)
    )  # fmt: skip
    thread = threading.Thread(target=run, args=(config, stop))

    def said() -> dict[str, Any]:
        return dict(json.loads(status.read_text())) if status.exists() else {}

    thread.start()
    try:
        wait_for(lambda: said().get("objects") == 1, LIMIT_S, "it sweeps")
        bed.file.write_text("classes: [")
        wait_for(lambda: said()["tenants_file_bad"] == 1, LIMIT_S, "it says that the file is broken")
        assert bed.there()["home"] == 1
        bed.write(std={"ttl_s": 1e-3})
        wait_for(lambda: bed.there()["home"] == 0, LIMIT_S, "the new TTL rules")
        wait_for(lambda: said()["tenants_file_bad"] == 0, LIMIT_S, "and the file is good")
    finally:
        stop.set()
        thread.join()


def test_a_record_of_containers_that_cannot_be_read_is_not_taken_for_none(bed: Bed) -> None:
    assert remember(bed.store, ["b"]) == ("b",) and remember(bed.store, ["a", "b"]) == ("a", "b") == known(bed.store)
    bed.store.account.put(bed.home, CONTAINERS_OBJECT, b"{}")
    bed.store.account.put(bed.home, name("acme", 1), b"x")
    with pytest.raises(DynamoBlobError, match="KV-CONTAINERS-INVALID"):
        bed.purge()
    assert bed.store.read_epochs() == {} and bed.there()["home"] == 1
    sweeper = bed.sweeper()
    assert sweeper.run_once(), "what the file names is swept all the same"
    sweeper.close()


def test_a_lost_record_of_containers_is_found_again_in_its_copy(bed: Bed) -> None:
    remember(bed.store, [bed.long])
    bed.store.account.put(bed.long, name("acme", 1), b"x")
    bed.write()  # no class names it any more
    bed.store.delete(bed.home, [CONTAINERS_OBJECT])
    assert known(bed.store) == (bed.long,)
    sweeper = bed.sweeper()
    assert sweeper.run_once() and bed.store.read(CONTAINERS_OBJECT)[0], "whoever adds to it writes it again"
    sweeper.close()
    bed.store.delete(bed.home, [CONTAINERS_OBJECT])
    report = bed.purge()
    assert bed.there()["long"] == 0 and bed.long in report["containers"] and report["deleted"] == 1
    bed.store.delete(bed.home, [containers.COPY_OBJECT])
    remember(bed.store, [])
    assert bed.store.read(containers.COPY_OBJECT)[0] == bed.store.read(CONTAINERS_OBJECT)[0], (
        "a lost copy is made again"
    )


def test_a_fault_while_the_file_is_read_leaves_the_last_good_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(yaml.safe_dump({"classes": {"std": RULE}, "default_class": "std"}))
    watched = Watched(str(file), "kv")
    monkeypatch.setattr(TenantsFile, "load", lambda _: 1 / 0)
    file.write_text(file.read_text() + "# changed\n")
    assert not watched.look() and "ZeroDivisionError" in watched.problem and watched.classes.default == "std"


def test_the_file_is_looked_at_by_content_and_the_last_good_one_stays(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"

    def write(ttl: float) -> None:
        file.write_text(yaml.safe_dump({"classes": {"std": {**RULE, "ttl_s": ttl}}, "default_class": "std"}))

    write(1)
    watched = Watched(str(file), "kv")
    assert not watched.look() and watched.classes.get("std").ttl_s == 1
    write(2)
    assert watched.look() and watched.classes.get("std").ttl_s == 2 and not watched.look()
    for broken in ("classes: [", "classes: {}"):
        file.write_text(broken)
        assert not watched.look() and watched.problem and watched.classes.get("std").ttl_s == 2
        assert not watched.look() and watched.problem, "still said"
    file.unlink()
    assert not watched.look() and watched.problem
    write(2)
    assert not watched.look() and not watched.problem, "as it was: nothing changed"
    file.write_text(file.read_text() + "# a comment\n")
    assert not watched.look() and not watched.problem
