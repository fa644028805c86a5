"""Case 24 (sgl#37160): `cache_salt` dropped on the way gives a cross-tenant hit that timing shows.

Our kind: the tenant travels inside the salt and nowhere else, so a hop that dropped or changed it must cost the hit,
never open another tenant's KV. (The same on the real engine, tier by tier: tests/promises/test_p6_tenants_apart.py.)
"""

from __future__ import annotations

import pytest

from components.common.kv.build import kv_params_for
from components.common.kv.classes import Classes
from components.common.kv.keys import PUBLIC, object_name
from components.common.messages.salt import compose, parse, tenant_hash

ACME, RIVAL = compose("acme", "standard", b"a" * 32, ""), compose("rival", "standard", b"b" * 32, "")
CLASSES = Classes.single("kv")


def name(salt: str | None, key: bytes = b"k" * 32) -> str | None:
    """Name of the chunk a worker would look up: equal hash assumed, i.e. the engine itself already lost the salt."""
    params = kv_params_for("aggregated", {}, salt)
    return object_name(params["tenant"], "c" * 32, key) if params["tenant"] else None


def test_two_tenants_never_name_one_object_even_when_the_engine_lost_the_salt() -> None:
    assert name(str(ACME)) != name(str(RIVAL))
    assert {name(str(ACME)), name(str(RIVAL)), name(None)} == {
        object_name(t, "c" * 32, b"k" * 32) for t in (tenant_hash("acme"), tenant_hash("rival"), PUBLIC)
    }


def test_a_dropped_salt_is_public_traffic_and_finds_nothing_of_a_tenant() -> None:
    assert kv_params_for("aggregated", {}, None)["tenant"] == PUBLIC
    assert not str(name(None)).startswith(ACME.tenant)


@pytest.mark.parametrize(
    "damaged", [str(ACME)[:-1], str(ACME).upper(), str(ACME) + "0", ACME.mac, "-".join(ACME[:2]), "x"]
)
@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
def test_a_damaged_salt_belongs_to_nobody(damaged: str, role: str) -> None:
    params = kv_params_for(role, {}, damaged)
    assert params["tenant"] == "" and params["kv_load_tiers"] == [], "neither looked up in nor put to any shared tier"
    assert CLASSES.place(damaged, PUBLIC).container == ""


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
def test_every_role_keeps_tenant_and_class(role: str) -> None:
    params = kv_params_for(role, {"kv_plan": {"max_load_tokens": 5}}, parse(str(ACME)))
    assert (params["tenant"], params["class"]) == (ACME.tenant, "standard")


def test_a_client_cannot_guess_or_reuse_a_salt_of_another() -> None:
    """A client's own salt goes through the tenant's key: the same words of two tenants never meet."""
    mine, theirs = compose("acme", "standard", b"a" * 32, str(RIVAL)), compose("acme", "standard", b"a" * 32, "")
    assert mine.tenant == theirs.tenant == ACME.tenant and len({mine.mac, theirs.mac, RIVAL.mac}) == 3
