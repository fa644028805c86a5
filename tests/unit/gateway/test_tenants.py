"""Credential to tenant, salts, limits; what clients may not set."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from components.common.errors import DynamoBlobError
from components.common.messages.salt import compose, parse, tenant_hash
from components.frontend.config import GatewayConfig
from components.frontend.errors import Refusal
from components.frontend.gateway import Gateway
from components.frontend.tenants import Tenants
from tests.unit.gateway.stub import MODEL, Seen, Stage, answer

KEYS = {"acme": "sk-acme-1", "clinic": "sk-clinic-1"}
SALT_KEYS = {"acme": b"a" * 32, "clinic": b"c" * 32}


def bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


def tenants_file(directory: Path, **limits: Any) -> str:
    """acme (with `limits`) and clinic."""
    entries: dict[str, Any] = {}
    for name, key in KEYS.items():
        secret = directory / f"{name}.salt"
        secret.write_bytes(SALT_KEYS[name])
        secret.chmod(0o600)
        entries[name] = {
            "keys": [hashlib.sha256(key.encode()).hexdigest()],
            "salt_key_file": secret.name,
            "class": "standard",
        }
    entries["acme"]["limits"] = limits
    path = directory / "tenants.yaml"
    classes = {"standard": {"ttl_s": 60, "max_ttl_s": 60, "bytes": "1GiB"}}
    path.write_text(yaml.safe_dump({"tenants": entries, "classes": classes, "default_class": "standard"}))
    return str(path)


def keyed(directory: Path, **limits: Any) -> dict[str, Any]:
    return {"auth": "keys", "tenants_file": tenants_file(directory, **limits)}


async def test_no_key_a_wrong_key_and_a_right_key(tmp_path: Path) -> None:
    async with Stage(tmp_path, **keyed(tmp_path)) as s:
        code, body, headers = await s.chat()
        assert (code, body["error"]["code"], headers["www-authenticate"]) == (401, "missing_api_key", "Bearer")
        for wrong in (
            {"authorization": "Bearer nope"},
            {"authorization": f"Basic {KEYS['acme']}"},
            {"x-api-key": "nope"},
        ):
            assert (await s.chat(wrong))[0] == 401
        assert not s.frontend.seen
        assert (await s.chat(bearer("acme")))[0] == 200
        assert (await s.chat({"x-api-key": KEYS["clinic"]}))[0] == 200
        async with s.client.get("/v1/models") as r:
            assert r.status == 401
        assert all("authorization" not in seen.headers and "x-api-key" not in seen.headers for seen in s.frontend.seen)


async def test_the_salt_is_the_tenants_and_folds_in_the_clients(tmp_path: Path) -> None:
    async with Stage(tmp_path, **keyed(tmp_path)) as s:
        await s.chat(bearer("acme"))
        await s.chat(bearer("acme"), cache_salt="x")
        await s.chat(bearer("clinic"), cache_salt="x")
        await s.chat(bearer("clinic"), nvext={"cache_salt": "x"})
        salts = [seen.body["cache_salt"] for seen in s.frontend.seen]
        assert salts[0] == str(compose("acme", "standard", SALT_KEYS["acme"], ""))
        assert salts[1] == str(compose("acme", "standard", SALT_KEYS["acme"], "x"))
        assert salts[2] == salts[3] == str(compose("clinic", "standard", SALT_KEYS["clinic"], "x"))
        assert len({*salts}) == 3
        assert "nvext" not in s.frontend.seen[3].body or "cache_salt" not in s.frontend.seen[3].body["nvext"]


async def test_a_copied_salt_of_another_tenant_opens_nothing(tmp_path: Path) -> None:
    stolen = str(compose("acme", "standard", SALT_KEYS["acme"], ""))
    async with Stage(tmp_path, **keyed(tmp_path)) as s:
        await s.chat(bearer("clinic"), cache_salt=stolen)
        used = parse(s.frontend.seen[0].body["cache_salt"])
        assert used is not None and used.tenant == tenant_hash("clinic")
    async with Stage(tmp_path) as s:  # auth: none drops the composed shape, keeps a plain one
        await s.chat(cache_salt=stolen)
        await s.chat(cache_salt="mine")
        assert ["cache_salt" in seen.body for seen in s.frontend.seen] == [False, True]


async def test_the_router_sees_the_same_salt_as_the_worker(tmp_path: Path) -> None:
    async with Stage(tmp_path, router=True, **keyed(tmp_path)) as s:
        await s.chat(bearer("acme"))
        assert s.router.messages[0]["salt"] == s.frontend.seen[0].body["cache_salt"] != ""


async def test_clients_cannot_pin_route_or_feed_tokens(tmp_path: Path) -> None:
    nvext = {
        "backend_instance_id": 1, "prefill_worker_id": 1, "decode_worker_id": 1, "dp_rank": 1, "prefill_dp_rank": 1, "token_data": [1], "router": {},
        "routing_constraints": {}, "metadata_upload": {"url": "http://169.254.169.254/"}, "request_timestamp_ms": 1.0,
        "annotations": ["query_instance_id:", "token_ids"], "agent_hints": {"priority": 9, "osl": 5}, "extra_fields": ["timing"],
    }  # fmt: skip
    headers = {
        "x-dynamo-prefill-instance-id": "1", "x-dynamo-worker-instance-id": "1", "X-Prefill-Instance-Id": "1", "x-worker-instance-id": "1", "x-dp-rank": "1",
        "x-data-parallel-rank": "1", "x-tenant-id": "acme", "x-dynamo-meta-load-plan": "{}", "x-dynamo-request-priority": "9", "x-request-id": "mine",
        "cookie": "a=b", "x-dynamo-session-id": "s", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }  # fmt: skip
    async with Stage(tmp_path, trace_share=0.0) as s:
        code, _, answer_headers = await s.chat(headers, nvext=nvext)
        seen = s.frontend.seen[0]
        assert code == 200
        assert seen.body["nvext"] == {
            "annotations": ["token_ids"],
            "agent_hints": {"osl": 5},
            "extra_fields": ["timing"],
        }
        ours = {"x-dynamo-request-id", "x-request-id"}
        assert {h for h in seen.headers if h.startswith("x-") or h == "cookie"} == ours
        assert seen.headers["traceparent"] == headers["traceparent"]
        assert seen.headers["x-request-id"] == answer_headers["x-request-id"] != "mine"
        code, body, _ = await s.chat(nvext={"new_pin": 1})
        assert code == 400 and "new_pin" in body["error"]["message"]


async def test_duplicate_keys_cannot_smuggle_a_pin(tmp_path: Path) -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"x"}],"nvext":{"token_data":[1]},"nvext":{"token_data":[2]}}'
    async with Stage(tmp_path, trace_share=0.0) as s:
        async with s.client.post("/v1/chat/completions", data=raw, headers={"content-type": "application/json"}) as r:
            assert r.status == 200
        assert "nvext" not in s.frontend.seen[0].body


async def test_concurrency_and_rate_are_per_tenant(tmp_path: Path) -> None:
    release, entered = asyncio.Event(), asyncio.Event()

    async def held(request: web.Request, seen: Seen) -> web.StreamResponse:
        entered.set()
        await release.wait()
        return await answer(request, seen)

    async with Stage(tmp_path, **keyed(tmp_path, concurrent=1, requests_per_minute=3)) as s:
        s.frontend.scripts = [held]
        first = asyncio.create_task(s.chat(bearer("acme")))
        await entered.wait()
        code, body, headers = await s.chat(bearer("acme"))
        assert (code, body["error"]["code"], body["error"]["type"]) == (429, "concurrency_limit", "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        assert (await s.chat(bearer("clinic")))[0] == 200
        release.set()
        assert (await first)[0] == 200
        assert [(await s.chat(bearer("acme")))[0] for _ in range(3)] == [200, 200, 429]
        code, body, headers = await s.chat(bearer("acme"))
        assert body["error"]["code"] == "rate_limit" and 1 <= int(headers["retry-after"]) <= 60
        assert (await s.chat(bearer("clinic")))[0] == 200


async def test_the_gateways_own_bound_holds_over_tenants(tmp_path: Path) -> None:
    release, entered = asyncio.Event(), asyncio.Event()

    async def held(request: web.Request, seen: Seen) -> web.StreamResponse:
        entered.set()
        await release.wait()
        return await answer(request, seen)

    async with Stage(tmp_path, max_concurrent=1) as s:
        s.frontend.scripts = [held]
        first = asyncio.create_task(s.chat())
        await entered.wait()
        assert (await s.chat())[1]["error"]["code"] == "overloaded"
        release.set()
        assert (await first)[0] == 200


async def test_body_limits(tmp_path: Path) -> None:
    async with Stage(tmp_path, **keyed(tmp_path, body_bytes=300), max_body_bytes=2000) as s:
        long = [{"role": "user", "content": "x" * 400}]
        assert (await s.chat(bearer("acme"), messages=long))[1]["error"]["code"] == "body_too_large"
        assert (await s.chat(bearer("clinic"), messages=long))[0] == 200
        assert (await s.chat(bearer("clinic"), messages=[{"role": "user", "content": "x" * 3000}]))[0] == 413

        async def dribble():  # type: ignore[no-untyped-def]
            for _ in range(30):
                yield b" " * 100

        async with s.client.post(
            "/v1/chat/completions", data=dribble(), headers=bearer("clinic") | {"content-type": "application/json"}
        ) as r:
            assert r.status == 413


def test_the_tenants_file_is_reloaded_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    now = [0.0]
    path = Path(tenants_file(tmp_path))
    tenants = Tenants(str(path), clock=lambda: now[0])

    def knows(tenant: str) -> bool:
        now[0] += 2
        try:
            tenants.caller(bearer(tenant))
        except Refusal as e:
            assert e.status == 401
            return False
        return True

    assert knows("acme") and knows("clinic")
    good = path.read_text()
    path.write_text("tenants: [")
    assert knows("acme") and tenants.reload_errors == 1
    assert knows("acme") and tenants.reload_errors == 1, "said once per change"
    raw = yaml.safe_load(good)
    del raw["tenants"]["clinic"]
    path.write_text(yaml.safe_dump(raw))
    assert knows("acme") and not knows("clinic") and tenants.reloads == 1
    path.write_text(good)
    assert knows("clinic")


def test_a_rotated_salt_key_makes_another_salt_and_a_lost_one_refuses(tmp_path: Path) -> None:
    now = [0.0]
    tenants = Tenants(tenants_file(tmp_path), clock=lambda: now[0])
    caller = tenants.caller(bearer("acme"))
    before = tenants.salt(caller, "")
    secret = tmp_path / "acme.salt"
    secret.write_bytes(b"z" * 32)
    os.utime(secret, ns=(1, 1))
    now[0] += 2
    tenants.caller(bearer("acme"))
    assert tenants.salt(caller, "") not in ("", before)
    secret.unlink()
    now[0] += 2
    tenants.caller(bearer("acme"))
    with pytest.raises(Refusal) as e:
        tenants.salt(caller, "")
    assert e.value.status == 503, "an unsalted request would share KV with everybody"


def test_auth_none_is_for_loopback_only() -> None:
    fields: dict[str, Any] = {
        "name": "g",
        "upstream": "http://127.0.0.1:9",
        "served_model": "m",
        "model_path": str(MODEL),
        "max_model_len": 9,
        "block_size": 1,
    }
    for listen in ("0.0.0.0:8000", "10.0.0.1:80", "[::]:8000", ":8000"):
        with pytest.raises(DynamoBlobError) as e:
            Gateway(GatewayConfig(auth="none", listen=listen, **fields))
        assert e.value.code == "GATEWAY-AUTH-NONE-PUBLIC"
    with pytest.raises(DynamoBlobError) as e:
        Gateway(GatewayConfig(auth="keys", **fields))
    assert e.value.code == "GATEWAY-NO-TENANTS"


async def test_a_tenant_sees_only_its_own_decisions(tmp_path: Path) -> None:
    async with Stage(tmp_path, **keyed(tmp_path)) as s:
        rid = (await s.chat(bearer("acme")))[2]["x-request-id"]
        for tenant, status in (("acme", 200), ("clinic", 404)):
            async with s.client.get(f"/debug/decisions/{rid}", headers=bearer(tenant)) as r:
                assert r.status == status
        async with s.client.get(f"/debug/decisions/{rid}") as r:
            assert r.status == 401
