"""Tenant, class and load plan reach the KV tiers as the gateway and the router meant them."""

import json

from components.common.engine.tags import tier_params
from components.common.messages.loadplan import KEY
from components.common.messages.salt import compose

SALT = compose("acme", "gold", b"k" * 32, "")


def test_the_composed_salt_names_tenant_and_class():
    params = tier_params("prefill", {}, str(SALT), False)
    assert (params["tenant"], params["class"]) == (SALT.tenant, "gold")


def test_the_routers_plan_is_honoured():
    plan = {"max_load_tokens": 512, "kv_load_tiers": [{"medium": "CPU"}]}
    params = tier_params("prefill", {KEY: json.dumps(plan)}, None, False)
    assert params["max_load_tokens"] == 512 and params["kv_load_tiers"] == [{"medium": "CPU"}]


def test_kv_that_comes_by_handover_is_not_looked_up():
    plan = {"kv_load_tiers": [{"medium": "CPU"}]}
    assert tier_params("decode", {KEY: json.dumps(plan)}, str(SALT), True)["kv_load_tiers"] == []


def test_a_plan_that_cannot_be_read_is_no_plan():
    params = tier_params("prefill", {KEY: '{"max_load_tokens": "all of them"}'}, None, False)
    assert "max_load_tokens" not in params and "kv_load_tiers" not in params


def test_a_salt_of_another_shape_stays_out_of_the_tiers():
    assert tier_params("prefill", {}, "my-own-salt", False)["kv_load_tiers"] == []
