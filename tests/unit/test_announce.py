"""Announcements over a real nats-server: who listens looks at once; without NATS everything holds, later."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.common.kv.config import KvTiersConfig
from components.common.kv.opened import open_tier
from components.common.kv.purge import Purge, PurgeConfig
from components.common.kv.store import KvStore
from components.common.loading.config import WeightsConfig
from components.common.messages import announce
from components.common.messages.announce import PENDING, Announcement, Kind, Listener, publish
from components.common.messages.salt import tenant_hash
from components.common.registry.approve import approve
from components.common.registry.config import ReleaseConfig
from components.common.registry.promote import promote
from components.common.registry.publish import publish_directory
from components.common.registry.signing import SigningKey
from components.common.storage.account import Account
from graphs.cli.main import main
from graphs.cli.purge import announcing
from tests import planes
from tests.faults.services import ServiceThread
from tests.kv_azurite import KvAzurite, free_port, name
from tests.registry_store import PROVENANCE, new_registry, write_model

TENANT = tenant_hash("acme")


def until(condition: Callable[[], object], what: str, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true in {deadline_s:g} s"
        time.sleep(0.01)


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[planes.Plane]:
    server = planes.nats(free_port(25700), tmp_path)
    server.start()
    yield server
    server.stop()


class Heard:
    """A listener that keeps what it was told."""

    def __init__(self, url: str, kind: Kind = "purged") -> None:
        self.items: list[Announcement | None] = []
        self.listener = Listener(url, kind, self.items.append, "test").start()

    def __enter__(self) -> Heard:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        assert not self.listener._thread.is_alive(), "the thread ends with the component"


def url(nats: planes.Plane) -> str:
    return f"nats://127.0.0.1:{nats.port}"


def purged(generation: int = 1) -> Announcement:
    return Announcement(kind="purged", tenant=TENANT, generation=generation)


def test_an_announcement_reaches_those_who_listen_for_its_kind(nats: planes.Plane) -> None:
    with Heard(url(nats)) as purges, Heard(url(nats), "promoted") as promotions:
        until(lambda: purges.items == [None] == promotions.items, "each looks once when it is connected")
        item = purged(3)
        assert publish(url(nats), item) == ""
        until(lambda: len(purges.items) == 2, "the purge is heard")
        assert purges.items[1] == item
        assert publish(url(nats), Announcement(kind="promoted", model="m", version="2")) == ""
        until(lambda: len(promotions.items) == 2, "the promotion is heard")
        assert len(purges.items) == 2 and promotions.items[1].version == "2"  # type: ignore[union-attr]


def test_without_nats_nobody_waits_and_all_is_well_when_it_comes(nats: planes.Plane) -> None:
    nats.stop()
    began = time.monotonic()
    why = publish(url(nats), purged())
    assert f"127.0.0.1:{nats.port}" in why and time.monotonic() - began < 3.5
    with Heard(url(nats)) as heard:  # starts before its server: not an error
        nats.start()
        until(lambda: heard.items == [None], "it looks when it is connected")
        for n in (2, 3):  # lost and regained, twice: it looks again, for what it could not hear
            nats.stop()
            until(lambda: not heard.listener.connected, "it knows that it hears nothing")
            nats.start()
            until(lambda n=n: heard.items == [None] * n, "it looks again")  # type: ignore[misc]
        assert publish(url(nats), purged()) == ""
        until(lambda: heard.items[-1] is not None, "it hears again")


def test_nonsense_is_refused_and_counted(nats: planes.Plane) -> None:
    async def say(*messages: bytes) -> None:
        import nats as client

        c = await client.connect(url(nats))
        for m in messages:
            await c.publish("dynamo_blob.purged", m)
        await c.flush()
        await c.close()

    with Heard(url(nats)) as heard:
        until(lambda: heard.items == [None], "connected")
        bad = [
            b"",
            b"{",
            b"[]",
            b'{"kind": "purged", "x": 1}',
            b'{"kind": "promoted"}',
            b"\xff" * 9,
            b'{"kind":"purged"}' + b" " * 5000,
        ]
        asyncio.run(say(*bad))
        assert publish(url(nats), purged()) == ""
        until(lambda: len(heard.items) == 2, "what follows is heard")
        assert heard.listener.counts["refused"] == len(bad)
        assert heard.listener.status()["last_error"]


def test_a_flood_costs_a_few_looks_and_no_memory(nats: planes.Plane) -> None:
    async def flood() -> None:
        import nats as client

        c = await client.connect(url(nats))
        for i in range(5000):
            await c.publish("dynamo_blob.purged", purged(i).model_dump_json().encode())
        await c.flush()
        await c.close()

    with Heard(url(nats)) as heard:
        until(lambda: heard.items == [None], "connected")
        asyncio.run(flood())
        until(lambda: len(heard.items) > 1, "it looked")
        assert heard.listener._queue.maxsize == PENDING
        c = heard.listener.counts
        until(lambda: heard.listener._queue.empty(), "what waited is done")
        assert len(heard.items) < 30, "messages that say the same are one look"
        assert c["heard"] <= 5000


def test_an_action_that_fails_ends_nothing(nats: planes.Plane) -> None:
    seen: list[object] = []

    def act(item: Announcement | None) -> None:
        seen.append(item)
        raise OSError("the store does not answer")

    listener = Listener(url(nats), "purged", act, "test").start()
    until(lambda: seen == [None], "connected")
    assert publish(url(nats), purged()) == ""
    until(lambda: len(seen) == 2, "heard after a failure")
    until(lambda: listener.counts["failed"] == 2, "counted")
    assert "the store does not answer" in listener.last_error
    listener.close()


def test_a_purge_is_known_to_the_tiers_at_once_and_its_objects_leave_the_index(
    nats: planes.Plane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiers look every ten minutes here: only the announcement can tell them in time."""
    azurite = KvAzurite(tmp_path, free_port(25720))
    account = Account(azurite.account)
    account.ensure_container("kv-test")
    store = KvStore(account, "kv-test")
    config = KvTiersConfig(
        dram_bytes=1 << 20, account=azurite.account, container="kv-test", staging_bytes=1 << 20, announce=url(nats),
        epochs_refresh_s=600, epochs_stale_s=1200,
    )  # fmt: skip
    tier = open_tier(config, "blob", 4096, [], "worker")
    try:
        assert tier.epochs is not None and tier.index is not None and tier.listener is not None
        until(lambda: tier.listener.counts["acted"], "its look at the start is over")  # type: ignore[union-attr]
        until(lambda: tier.epochs.generation(TENANT) == 0, "the generations were read")  # type: ignore[union-attr]
        mine, other = name("acme", 1), name("other", 1)
        for n in (mine, other):
            store.account.put("kv-test", n, b"x")
            tier.index.note_put(n, 1, "default", 1.0)
        args = argparse.Namespace(json=True, announce=url(nats), state=tmp_path, plan=None)
        plan = PurgeConfig(
            account=azurite.account, control="kv-test", containers=("kv-test",), tenant="acme", settle_s=0.0
        )
        report = Purge(plan, store, SigningKey.generate(), step=announcing(args, plan, 600)).run()
        until(lambda: tier.epochs.generation(TENANT) == 1, "the new generation is known")  # type: ignore[union-attr]
        until(lambda: tier.index.lookup(mine) is not True, "the index forgot it")  # type: ignore[union-attr]
        assert tier.index.lookup(other) is True
        assert report["probe"]["clean"] and capsys.readouterr().err == ""
    finally:
        tier.close(5)
        store.close()
        account.close()
        azurite.close()


def test_telling_nobody_is_a_warning_with_what_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from graphs.cli._announce import tell, urls

    args = argparse.Namespace(announce="nats://127.0.0.1:25799", state=tmp_path)
    tell(args, purged(), "workers look every 5 s")
    err = capsys.readouterr().err
    assert "ANNOUNCE-FAILED" in err and "25799" in err and "every 5 s" in err
    assert urls(argparse.Namespace(announce="", state=tmp_path)) == [], (
        "no graph runs here, no plan is given: nobody to tell"
    )
    plan = tmp_path / "plan.json"
    golden = json.loads((Path(__file__).parents[1] / "golden/plans/disagg-cluster.json").read_text())
    plan.write_text(json.dumps({**golden, "processes": list(golden["processes"].values()), "source": "g"} | {}))
    data = json.loads(plan.read_text())
    data.pop("order")
    plan.write_text(json.dumps(data))
    assert urls(argparse.Namespace(announce="", state=tmp_path, plan=plan)) == ["nats://127.0.0.1:4222"]


def test_a_promotion_reaches_a_weight_service_which_goes_on_serving_what_it_pinned(
    nats: planes.Plane, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """`dynamo release promote` as an approver calls it; the service is a real one, over its socket."""
    r = new_registry()
    key = tmp_path / "approver.pem"
    r.approver_key.write(key)
    for v in ("1", "2"):
        model = write_model(tmp_path / v, note=v)
        publish_directory(r.publisher, r.layout.container, model, "m", v, key=r.publisher_key, provenance=PROVENANCE)
        approve(r.approver, r.layout, "m", v, r.approver_key)
    promote(r.approver, r.layout, "m", "1", r.approver_key, r.trust)
    weights = WeightsConfig(
        release=ReleaseConfig(model="m", container=r.layout.container), account=r.serving.config, trust=r.trust,
        root=str(tmp_path / "root"),
    )  # fmt: skip
    command = [
        "--account", r.approver.config.url, "--container", r.layout.container, "--sas-file", r.approver.config.credential.path,
        "--key", str(key), "--announce", url(nats),
    ]  # fmt: skip
    trusted = ["--publisher-key", r.publisher_key.public, "--approver-key", r.approver_key.public]
    with ServiceThread(tmp_path / "s", weights, announce=url(nats)) as service, caplog.at_level("WARNING"):
        until(lambda: service.status()["channel"] == {"current": "1", "serves": "1"}, "its look at the start is over")
        assert main(["release", "promote", "m", "2", *command, *trusted]) == 0
        until(lambda: service.status()["channel"] == {"current": "2", "serves": "1"}, "it heard of the promotion")
        assert "m 2 is current now; 1 stays in service until a restart" in caplog.text
        assert service.client.release().version == "1"
        assert main(["release", "rollback", "m", *command]) == 0
        until(lambda: service.status()["channel"] == {"current": "1", "serves": "1"}, "it heard of the rollback")
        nats.stop()
        assert "ANNOUNCE" not in capsys.readouterr().err
        assert main(["release", "promote", "m", "2", *command, *trusted]) == 0, "what is done is done"
        assert "ANNOUNCE-FAILED" in capsys.readouterr().err
        assert service.client.release().version == "1" and service.status()["channel"]["current"] == "1"
        nats.start()
        until(
            lambda: service.status()["channel"] == {"current": "2", "serves": "1"},
            "it looks when it is connected again",
        )


def test_components_that_hold_nothing_say_what_they_heard(nats: planes.Plane, tmp_path: Path) -> None:
    """Gateway, router and workers: the newest of each kind stands in their status."""
    heard = announce.Heard(f"nats://127.0.0.1:{nats.port}", "frontend-0")
    try:
        until(lambda: heard.status()["listening"], "it listens")
        assert publish(f"nats://127.0.0.1:{nats.port}", Announcement(kind="promoted", model="m", version="2")) == ""
        assert (
            publish(f"nats://127.0.0.1:{nats.port}", Announcement(kind="purged", tenant="0" * 32, generation=3)) == ""
        )
        until(lambda: len(heard.newest) == 2, "both were heard")
        assert heard.status()["promoted"]["version"] == "2" and heard.status()["purged"]["generation"] == 3
    finally:
        heard.close()
    silent = announce.Heard("", "frontend-0")
    assert silent.status() == {"listening": False}
    silent.close()
