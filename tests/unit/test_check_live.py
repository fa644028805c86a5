"""`dynamo check --live`, probe by probe: each finds its fault, and says nothing of what is sound."""

from __future__ import annotations

import http.server
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.common.storage.errors import from_http
from graphs.check import live
from graphs.check import planes as asked
from graphs.load import Finding, read_graph
from tests import planes
from tests.kv_azurite import free_port
from tests.memory_account import Blobs, MemoryAccount

GRAPH = Path(__file__).parents[2] / "graphs/mock-cluster.yaml"
URL = "https://acct.blob.core.windows.net"


def codes(findings: Iterator[Finding] | list[Finding]) -> list[str]:
    return [f.code for f in findings]


class Sdk:
    """What `forgets` asks of the SDK."""

    def __init__(self, soft_delete_days: int = 0, version: str = "", forbidden: bool = False) -> None:
        self.days, self.version, self.forbidden = soft_delete_days, version, forbidden

    def get_service_properties(self) -> dict[str, Any]:
        if self.forbidden:
            raise from_http(403, "AuthorizationPermissionMismatch", URL, "serving")
        return {"delete_retention_policy": SimpleNamespace(enabled=bool(self.days), days=self.days)}

    def upload_blob(self, data: bytes) -> dict[str, str | None]:
        return {"version_id": self.version or None}


class KvAccount(MemoryAccount):
    def __init__(self, sdk: Sdk, **kwargs: Any) -> None:
        super().__init__(Blobs({"kv": {}}), **kwargs)
        self.service = sdk

    def blob(self, container: str, name: str) -> Any:
        self.blobs.containers[container][name] = next(
            iter(MemoryAccount(Blobs({"x": {}})).blobs.containers.values()), None
        )  # type: ignore[assignment]
        return self.service

    def errors(self, *_: str) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def delete(self, container: str, name: str, **_: Any) -> None:
        self.blobs.containers[container].pop(name, None)


def refusing(method: str) -> Any:
    def hook(what: str) -> None:
        if what.startswith(method):
            raise from_http(403, "AuthorizationPermissionMismatch", URL, "serving")

    return hook


def test_a_writable_weights_account_is_an_error_and_a_refused_write_is_right() -> None:
    blobs = Blobs({"weights": {}})
    assert codes(live.cannot_write(MemoryAccount(blobs), "weights", "w")) == ["LIVE-RIGHTS-TOO-WIDE"]  # type: ignore[arg-type]
    assert not blobs.containers["weights"], "what the probe wrote is gone"
    assert codes(live.cannot_write(MemoryAccount(blobs, hook=refusing("put")), "weights", "w")) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["put", "get", "delete"])
def test_kv_rights_must_suffice(method: str) -> None:
    blobs = Blobs({"kv": {}})
    assert codes(live.can_write(MemoryAccount(blobs), "kv", "k")) == []  # type: ignore[arg-type]
    assert not blobs.containers["kv"]
    assert codes(live.can_write(MemoryAccount(blobs, hook=refusing(method)), "kv", "k")) == ["LIVE-RIGHTS-TOO-NARROW"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sdk", "expected"),
    [
        (Sdk(), []),
        (Sdk(soft_delete_days=7), ["LIVE-KV-SOFT-DELETE"]),
        (Sdk(version="2026-11-29T00:00:00.0000000Z"), ["LIVE-KV-VERSIONS"]),
        (Sdk(7, "v"), ["LIVE-KV-SOFT-DELETE", "LIVE-KV-VERSIONS"]),
        (Sdk(forbidden=True), ["LIVE-KV-PROPERTIES"]),
    ],
)
def test_a_kv_account_that_keeps_what_is_deleted_is_found(sdk: Sdk, expected: list[str]) -> None:
    account = KvAccount(sdk)
    assert codes(live.forgets(account, "kv", "k")) == expected  # type: ignore[arg-type]
    assert not account.blobs.containers["kv"]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["10.20.1.4"], []),
        (["10.20.1.4", "fd00::4"], []),
        (["20.60.1.1"], ["LIVE-PUBLIC-ADDRESS"]),
        (["10.20.1.4", "20.60.1.1"], ["LIVE-PUBLIC-ADDRESS"]),
        ([], ["LIVE-DNS"]),
    ],
)
def test_an_endpoint_that_resolves_publicly_is_found(
    addresses: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        assert host == "acct.blob.core.windows.net"
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, 1, 6, "", (a, 443)) for a in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert codes(live.address(URL, "s")) == expected


def test_a_far_account_and_a_slow_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    account: Any = MemoryAccount(Blobs({"kv": {}}))
    account.create("kv", "x", b"1" * live.PROBE_BYTES)
    reads = [("kv", "x", 0)] * 8
    assert codes(live.distance(account, "kv", "k")) == []
    assert live.measured("kv", 4, reads, account, "k").code == "LIVE-RATE"
    clock = iter(i * 0.03 for i in range(10**6))  # every look at the clock is 30 ms after the last
    monkeypatch.setattr(live.time, "monotonic", lambda: next(clock))
    assert codes(live.distance(account, "kv", "k")) == ["LIVE-FAR"]
    slow = live.measured("kv", 4, reads, account, "k")
    assert (slow.code, slow.severity) == ("LIVE-SLOW", "warning") and "4 in flight" in slow.why


def test_the_kv_rate_is_measured_at_the_tiers_concurrency_and_leaves_nothing() -> None:
    account: Any = MemoryAccount(Blobs({"kv": {}}))
    worker = SimpleNamespace(config={"kv": {"settings": {"threads": 6}}})
    plan: Any = SimpleNamespace(processes=[SimpleNamespace(config=None), worker])
    (found,) = live.kv_rate(plan, account, "kv", "k")
    assert found.code == "LIVE-RATE" and "6 in flight" in found.why and "p99" in found.why
    assert not account.blobs.containers["kv"]


def test_the_region_is_the_machines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = self.headers.get("Metadata") == "true"
            self.send_response(200 if good else 400)
            self.end_headers()
            self.wfile.write(b"westeurope" if good else b"")

        def log_message(self, *_: Any) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(live, "METADATA", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the metadata service is never asked through a proxy
    try:
        for region, expected in (("westeurope", []), ("West Europe", []), ("swedencentral", ["LIVE-REGION"])):
            graph = read_graph(GRAPH, [f"cluster.region={region}"])
            assert codes(live.region(graph)) == expected
        assert codes(live.region(read_graph(GRAPH))) == [], "no region is named, nobody is asked"
    finally:
        server.shutdown()
        server.server_close()
    assert codes(live.region(read_graph(GRAPH, ["cluster.region=x"]))) == [], "no metadata service: not on Azure"


def test_planes_that_serve_and_planes_that_only_listen(tmp_path: Path) -> None:
    port = free_port(25740)
    etcd, nats = planes.etcd(port, tmp_path), planes.nats(port + 10, tmp_path)
    graph = read_graph(
        GRAPH, [f"runtime.etcd_url=http://127.0.0.1:{port}", f"runtime.nats_url=nats://127.0.0.1:{port + 10}"]
    )
    try:
        etcd.start()
        nats.start()
        good = list(asked.planes(graph))
        assert codes(good) == ["LIVE-PLANE-OK", "LIVE-PLANE-OK"] and all(f.severity == "info" for f in good)
        assert "etcd 3.5" in good[0].why and "NATS 2." in good[1].why
        etcd.stop()
        nats.stop()
        away = list(asked.planes(graph))
        assert codes(away) == ["LIVE-PLANE", "LIVE-PLANE"] and all(f.severity == "error" for f in away)
        assert away[0].where.rpartition(":")[0] != away[1].where.rpartition(":")[0] and "runtime" not in away[0].why
    finally:
        etcd.stop()
        nats.stop()
    held = [socket.create_server(("127.0.0.1", p)) for p in (port, port + 10)]  # they accept, and say nothing
    try:
        mute = list(asked.planes(graph))
        assert codes(mute) == ["LIVE-PLANE", "LIVE-PLANE"]
    finally:
        for s in held:
            s.close()


def test_an_etcd_out_of_space_is_found(tmp_path: Path) -> None:
    """It answers reads and status; workers would start and never be listed."""
    port = free_port(25760)
    etcd = planes.etcd(port, tmp_path)
    etcd.argv += ["--quota-backend-bytes", "65536"]
    etcd.start()
    try:
        import pyetcd

        client = pyetcd.client(port=port, timeout=30)
        with pytest.raises(Exception, match=r"database space exceeded|mvcc"):
            for i in range(100):
                client.put(f"k{i}", b"x" * 8192)
        client.close()
        end, said = time.monotonic() + 60, "no error"
        while not re.search("alarm|space", said):  # the alarm travels through etcd's own log
            assert time.monotonic() < end, said
            try:
                asked.etcd(f"http://127.0.0.1:{port}")
            except Exception as e:
                said = str(e)
    finally:
        etcd.stop()
