"""P6 on the real engine: one prompt, two tenants, no hit at HBM, DRAM or Blob, nor visible by timing's cause (computed
tokens). Every "no hit" stands beside the control that the same tier does hit for the owner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.kv.build import kv_params_for
from components.common.kv.classes import Classes
from components.common.kv.keys import PUBLIC, parse_name
from components.common.kv.store import KvStore
from components.common.kv.sweeper import Sweeper, SweeperConfig
from components.common.messages.salt import Salt, compose, tenant_hash
from components.common.messages.tenants import RetentionClass, TenantsFile, read_salt_key, rotate_salt_key
from tests.kvtools import kv
from tests.kvtools.azure import Store, azurite
from tests.kvtools.engines import Driver, Engine
from tests.kvtools.text import ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

N, BORDER = 520, 512
LONG = kv.CONTAINER + "-long"


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> TenantsFile:
    folder = tmp_path_factory.mktemp("tenants")
    names = {"acme": "standard", "rival": "standard", "shy": "ephemeral", "keeper": "long"}
    for name in names:
        rotate_salt_key(folder / f"{name}.salt")
    rule = {"ttl_s": 1000, "max_ttl_s": 2000, "bytes": "1GiB"}
    (folder / "tenants.yaml").write_text(
        yaml.safe_dump({
            "tenants": {
                n: {"keys": [hashlib.sha256(n.encode()).hexdigest()], "salt_key_file": f"{n}.salt", "class": c} for n, c in names.items()
            },
            "classes": {"standard": rule, "long": {**rule, "container": LONG}, "ephemeral": {**rule, "bytes": 0, "ephemeral": True}},
            "default_class": "standard",
        })
    )  # fmt: skip
    return TenantsFile.load(folder / "tenants.yaml")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with azurite(tmp_path_factory.mktemp("azurite")) as store:
        for container in (kv.CONTAINER, LONG):
            store.account().ensure_container(container)
        yield store


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, store: Store, tenants: TenantsFile) -> Iterator[Engine]:
    settings = kv.settings(store, tenants_file=str(Path(tenants.directory) / "tenants.yaml"))
    with (
        Driver(tmp_path_factory.mktemp("driver")) as driver,
        driver.engine("a", "tiny-full", **kv.engine_args(settings)) as engine,
    ):
        yield engine


def salt_of(tenants: TenantsFile, name: str, client: str = "") -> Salt:
    """As the gateway composes it."""
    return compose(name, tenants.class_of(name), tenants.salt_key(name), client)


def ask(engine: Engine, prompt: list[int], salt: Salt | None, **kwargs: Any) -> dict[str, Any]:
    """As the worker passes it on."""
    params = kv_params_for("aggregated", {}, salt)
    before = engine.sources().get("local_compute", 0.0)
    out = engine.generate(prompt, salt=str(salt) if salt else "", kv=params, max_tokens=4, **kwargs)
    return {**out, "computed": engine.sources().get("local_compute", 0.0) - before}


def objects(store: Store, container: str = kv.CONTAINER) -> dict[str, int]:
    """{tenant hash: objects}."""
    out: dict[str, int] = {}
    for blob in store.account().list(container):
        if name := parse_name(blob.name):
            out[name.tenant] = out.get(name.tenant, 0) + 1
    return out


def wait_objects(store: Store, tenant: str, n: int, container: str = kv.CONTAINER) -> None:
    from tests.kvtools.proxy import wait_for

    wait_for(lambda: objects(store, container).get(tenant, 0) >= n, 30, f"{n} objects of {tenant}")


def empty_above(engine: Engine, tier: str) -> None:
    """Leave the tier in question as the highest that holds anything."""
    if tier != "hbm":
        engine.forget(dram=tier == "blob")


@pytest.mark.parametrize("tier", ["hbm", "dram", "blob"])
@pytest.mark.parametrize("other", ["rival", "unsalted", "client salt", "rotated key"])
def test_no_hit_across_tenants_at_any_tier(
    engine: Engine, store: Store, tenants: TenantsFile, tier: str, other: str
) -> None:
    prompt = ids(N, seed=5000 + sum(map(ord, tier + other)))
    owner = salt_of(tenants, "acme")
    stranger = {
        "rival": salt_of(tenants, "rival"),
        "unsalted": None,
        "client salt": salt_of(tenants, "acme", "another user of the tenant"),
        "rotated key": compose("acme", "standard", b"another key of the tenant" * 2, ""),
    }[other]
    before = objects(store).get(owner.tenant, 0)
    cold = ask(engine, prompt, owner)
    assert cold["cached"] == 0
    wait_objects(store, owner.tenant, before + BORDER // 128)
    empty_above(engine, tier)
    theirs = ask(engine, prompt, stranger)
    assert theirs["cached"] == 0 and theirs["computed"] == N, "computes every token: timing has nothing to show"
    mine = ask(engine, prompt, owner)
    assert mine["cached"] == BORDER and mine["computed"] == N - BORDER, f"control: the owner hits at {tier}"
    print(f"{tier}/{other}: ttft cold {cold['ttft']:.4f}, stranger {theirs['ttft']:.4f}, owner {mine['ttft']:.4f}")


def test_unsalted_traffic_shares_with_itself_but_is_read_by_no_tenant(
    engine: Engine, store: Store, tenants: TenantsFile
) -> None:
    prompt = ids(N, seed=71)
    before = objects(store).get(PUBLIC, 0)
    ask(engine, prompt, None)
    wait_objects(store, PUBLIC, before + BORDER // 128)
    for tier in ("hbm", "dram", "blob"):
        empty_above(engine, tier)
        assert ask(engine, prompt, salt_of(tenants, "rival", tier))["cached"] == 0
    engine.forget(dram=True)
    assert ask(engine, prompt, None)["cached"] == BORDER


def test_the_control_would_notice_one_salt_for_two_tenants(engine: Engine, store: Store, tenants: TenantsFile) -> None:
    """Negative control: a gateway that gave both tenants one key. HBM and DRAM hit; Blob still does not, for the
    tenant is part of the name."""
    prompt = ids(N, seed=72)
    key = tenants.salt_key("acme")
    one, two = compose("acme", "standard", key, ""), compose("rival", "standard", key, "")
    before = objects(store).get(one.tenant, 0)
    engine.generate(prompt, salt=one.mac, kv=kv_params_for("aggregated", {}, one), max_tokens=4)
    wait_objects(store, one.tenant, before + BORDER // 128)
    for tier, cached in (("hbm", BORDER), ("dram", BORDER), ("blob", 0)):
        empty_above(engine, tier)
        got = engine.generate(prompt, salt=two.mac, kv=kv_params_for("aggregated", {}, two), max_tokens=4)
        assert got["cached"] == cached, tier


def test_every_object_lies_under_its_tenants_prefix_in_its_classs_container(
    engine: Engine, store: Store, tenants: TenantsFile
) -> None:
    prompt = ids(N, seed=73)
    keeper = salt_of(tenants, "keeper")
    ask(engine, prompt, keeper)
    wait_objects(store, keeper.tenant, BORDER // 128, LONG)
    assert keeper.tenant not in objects(store) and set(objects(store, LONG)) == {keeper.tenant}
    assert set(objects(store)) <= {tenant_hash("acme"), tenant_hash("rival"), PUBLIC}


def test_ephemeral_kv_never_leaves_hbm_and_dram(engine: Engine, store: Store, tenants: TenantsFile) -> None:
    prompt, shy = ids(N, seed=74), salt_of(tenants, "shy")
    ask(engine, prompt, shy)
    marker = ids(N, seed=75)  # a later store of another tenant has landed: the queue has passed the ephemeral one
    before = objects(store).get(tenant_hash("acme"), 0)
    ask(engine, marker, salt_of(tenants, "acme"))
    wait_objects(store, tenant_hash("acme"), before + BORDER // 128)
    assert all(shy.tenant not in objects(store, c) for c in (kv.CONTAINER, LONG))
    engine.forget()
    assert ask(engine, prompt, shy)["cached"] == BORDER, "control: DRAM serves it"
    engine.forget(dram=True)
    assert ask(engine, prompt, shy)["cached"] == 0


def test_a_rotated_key_makes_old_entries_unreachable_and_the_sweeper_takes_them(
    engine: Engine, store: Store, tenants: TenantsFile
) -> None:
    prompt = ids(N, seed=76)
    old = salt_of(tenants, "rival")
    before = objects(store).get(old.tenant, 0)
    ask(engine, prompt, old)
    wait_objects(store, old.tenant, before + BORDER // 128)
    path = tenants.salt_key_path("rival")
    was = read_salt_key(path)
    rotate_salt_key(path)
    assert read_salt_key(path) != was
    new = salt_of(tenants, "rival")
    for tier in ("hbm", "dram", "blob"):
        empty_above(engine, tier)
        assert ask(engine, prompt, Salt(new.tenant, new.cls, new.mac))["cached"] == (0 if tier == "hbm" else BORDER)
        # (from the second round on the new key hits what itself left: that is the control)
    kv_store = KvStore(store.account(), kv.CONTAINER)
    rule = RetentionClass(ttl_s=1000, max_ttl_s=2000, bytes=1 << 30)
    sweeper = Sweeper(
        SweeperConfig(account=store.account_config(), container=kv.CONTAINER, lease_s=15),
        kv_store,
        Classes({"standard": rule}, "standard", kv.CONTAINER),
    )
    import time

    sweeper._clock = lambda: (
        time.time() + 990
    )  # old entries, never hit again, are past their TTL; fresh hits extend theirs
    sweeper._forget()
    assert sweeper.run_once()
    sweeper._clock = lambda: time.time() + 3000
    assert sweeper.run_once()
    assert objects(store).get(old.tenant, 0) == 0
    sweeper.close()
    kv_store.close()
