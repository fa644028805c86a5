"""P6: a put that was under way when its tenant was purged: never sent, or gone by the time the purge is proven."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common.errors import DynamoBlobError
from components.common.kv.fence import asked
from components.common.kv.keys import parse_name
from components.common.kv.purge import Purge, PurgeConfig, State
from components.common.kv.store import WORKERS_PREFIX, KvStore
from components.common.messages.salt import tenant_hash
from components.common.registry.signing import SigningKey
from tests.kvtools import kv
from tests.kvtools.azure import free_port, new_container, shared
from tests.kvtools.manager import Scheduler
from tests.kvtools.proxy import FaultProxy, wait_for

TENANT = tenant_hash("acme")
LIMIT_S = 90.0


class Bed:
    """One worker whose requests for objects of the tenant can be held on their way."""

    def __init__(self, proxy: FaultProxy, store: KvStore, deadline_s: float) -> None:
        self.proxy, self.store = proxy, store
        self.path = f"{store.control}/{TENANT}/"
        settings = kv.settings(
            shared(), port=proxy.port, container=store.control, store_deadline_s=deadline_s, epochs_refresh_s=0.2, workers=1,
            staging_bytes=4 * (16384 + 4096),
        )  # fmt: skip
        self.worker = Scheduler(settings)
        wait_for(lambda: self.worker.tier._opened.epochs.generation(TENANT) == 0, LIMIT_S, "the generations are known")

    def puts(self) -> int:
        return sum(s.method == "PUT" and self.path in s.path for s in self.proxy.seen)

    def over(self) -> bool:
        """Every put that reached the proxy has been answered by the store."""
        return all(s.done for s in self.proxy.seen if s.method == "PUT" and self.path in s.path)

    def put(self, *chunks: str) -> None:
        self.worker.put(self.worker.request(tenant=TENANT, chunks=chunks), chunks)

    def put_and_hold(self) -> None:
        """One put is on its way and held there, past its deadline."""
        self.proxy.fault("hold", match=self.path, methods=("PUT",))
        for n in itertools.count():
            self.put(f"a{n}")  # on a busy machine one may be late before it was sent: then the next
            self.worker.settle()
            if self.puts():
                return

    def out(self) -> bool:
        """The worker has said that a put of before the purge is still out."""
        return bool(asked(self.store, TENANT, 1).waiting)

    def there(self) -> list[str]:
        return [i.name for i in self.store.list(self.store.control, TENANT + "/") if parse_name(i.name)]

    def purge(self, step: Any = None, **kwargs: Any) -> dict[str, Any]:
        """As `dynamo purge`; instead of the time that workers have to answer, it waits until this one has."""
        config = PurgeConfig(
            account=self.store.account.config, control=self.store.control, containers=(self.store.control,), tenant="acme",
            settle_s=0, **kwargs,
        )  # fmt: skip
        return Purge(config, self.store, SigningKey.generate(), step=step).run()


@pytest.fixture
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    account = shared().account()
    store = KvStore(account, new_container(shared()))
    with FaultProxy(shared().port, free_port()) as proxy:
        bed = Bed(proxy, store, getattr(request, "param", 0.5))
        yield bed
        proxy.heal()
        bed.worker.settle()
        wait_for(lambda: bed.worker.tier._opened.pool.quarantined == 0, LIMIT_S, "no transfer is left")
        bed.worker.__exit__()
    assert list(store.list(store.control, WORKERS_PREFIX)) == [], "a worker that ended in order is not asked again"
    store.close()
    account.close()


def test_a_put_the_network_holds_across_the_purge_is_not_there_once_the_purge_is_proven(bed: Bed) -> None:
    bed.put_and_hold()
    steps: list[str] = []

    def step(phase: str, _: State) -> None:
        steps.append(phase)
        if phase == "settle":
            wait_for(bed.out, LIMIT_S, "the worker has answered")
        if phase == "overdue":  # past its deadline, and the purge knows that it is still under way
            bed.proxy.heal()

    report = bed.purge(step)
    after = bed.there()
    bed.proxy.heal()
    wait_for(lambda: bed.puts() > 0 and bed.over(), LIMIT_S, "the store has answered the put")
    assert bed.there() == after == [] and "overdue" in steps
    assert len(report["workers"]["confirmed"]) == 1 and not report["workers"]["silent"]


def test_a_put_that_stays_under_way_is_named_instead_of_a_proof(bed: Bed) -> None:
    """Negative control: the worker answers, and its put is still out."""
    bed.put_and_hold()

    def step(phase: str, _: State) -> None:
        if phase == "settle":
            wait_for(bed.out, LIMIT_S, "the worker has answered")

    with pytest.raises(DynamoBlobError, match="KV-PURGE-UNPROVEN") as e:
        bed.purge(step, overdue_s=1.0)
    assert "1 put" in e.value.why
    bed.proxy.heal()
    wait_for(lambda: asked(bed.store, TENANT, 1).confirmed, LIMIT_S, "the worker has seen to it")
    assert bed.there() == [] and bed.worker.tier._opened.fence.deleted == 1
    assert bed.purge()["generation"] == 2  # taken up again


@pytest.mark.parametrize("bed", [300.0], indirect=True)
def test_a_put_that_waited_in_the_queue_across_a_purge_is_never_sent(bed: Bed) -> None:
    bed.proxy.fault("hold", match=bed.path, methods=("PUT",))
    bed.put("a", "b", "c", "d", "e", "f")
    slots = bed.worker.tier._opened.pool.count - 1  # one is kept for loads
    wait_for(lambda: bed.puts() == slots, LIMIT_S, "the slots are taken")
    bed.store.raise_epoch(TENANT)
    wait_for(lambda: bed.worker.tier._opened.epochs.generation(TENANT) == 1, LIMIT_S, "the worker knows of the purge")
    bed.proxy.heal()
    bed.worker.settle()
    assert bed.puts() == slots and bed.worker.reasons().get("store_refused", 0) == 6
    wait_for(lambda: asked(bed.store, TENANT, 1).confirmed, LIMIT_S, "the worker deleted what landed")
    assert bed.there() == []
    bed.put("g")  # under the generation of now
    wait_for(lambda: len(bed.there()) == 1, LIMIT_S, "it puts again")


def test_a_worker_that_cannot_make_itself_known_puts_nothing(tmp_path: Path) -> None:
    store = KvStore(shared().account(), new_container(shared()))
    with FaultProxy(shared().port, free_port()) as proxy:
        proxy.fault("status", 503, match=WORKERS_PREFIX, methods=("PUT",))
        bed = Bed.__new__(Bed)
        settings = kv.settings(shared(), port=proxy.port, container=store.control, epochs_refresh_s=0.2)
        worker = bed.worker = Scheduler(settings)
        bed.put("a")
        worker.settle()
        assert worker.tier.counts["store_dropped", "generation_unknown"] == 1
        proxy.heal()
        wait_for(lambda: worker.tier._opened.epochs.generation(TENANT) == 0, LIMIT_S, "known at last")
        worker.__exit__()
    store.close()
