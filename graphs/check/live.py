"""`dynamo check --live`: asks the accounts and planes of a graph, as they are now, under the identities components use.

Rights must suffice and not exceed: a serving identity that can write weights is an error, because then
one compromised worker could put weights into service. Not asked: the account's region (no data-plane call tells it).
"""

from __future__ import annotations

import ipaddress
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from components.common.registry.layout import Layout
from components.common.storage.account import Account
from components.common.storage.config import AccountConfig
from components.common.storage.errors import StorageError
from graphs.check.storage import loopback
from graphs.compile import compile_plan
from graphs.launch import runs
from graphs.load import Finding, Graph, read_graph
from graphs.plan import Plan
from graphs.site import Site

PROBE_BYTES, PROBES_MOST = 1 << 20, 64
SLOW_BYTES_PER_S = 50e6
"""Below this rate even a small model's weights take minutes and KV from Blob never beats recomputing."""


def check_live(path: str, sets: list[str] | tuple[str, ...] = (), state: Path | None = None) -> list[Finding]:
    """Findings of one graph; severity `info` for what was measured. Never raises for an account in a bad state."""
    graph = read_graph(path, sets)
    state = (state or runs.default_state()).absolute()
    run = _run(graph, state)
    if run is None:
        return [
            Finding(
                "LIVE-NOT-RUNNING", "the embedded store does not run", graph.place("storage", "embedded"), "its credentials exist only while a graph serves",
                "start the graph (`dynamo serve`), then ask again", "warning",
            )
        ]  # fmt: skip
    plan = compile_plan(graph, Site(run=run, state=state))
    out = [*planes(graph)]
    for role, config in accounts(plan).items():
        where = graph.place("storage", role)
        try:
            with closing(Account(config)) as account:
                out += list(_account(graph, plan, role, account, where))
        except StorageError as e:
            out.append(Finding(e.code, e.what, where, f"{e.where}: {e.why}", e.do))
    return out


def _run(graph: Graph, state: Path) -> Path | None:
    """Run directory that holds the credentials; any path when none are needed."""
    if graph.spec.storage.embedded != "azurite":
        return state / "runs" / "check"
    found = [r for r in runs.all_runs(state) if r.launcher_alive and not r.closed and (r.path / "credentials").is_dir()]
    return found[0].path if found else None


def accounts(plan: Plan) -> dict[str, AccountConfig]:
    """Each account as a worker reaches it."""
    out: dict[str, AccountConfig] = {}
    for p in plan.processes:
        config: dict[str, Any] = p.config or {}
        if p.component in ("prefill", "decode", "aggregated"):
            out.setdefault("weights", AccountConfig.model_validate(config["weights"]["account"]))
            kv = (config.get("kv") or {}).get("settings") or {}
            if kv.get("account"):
                out.setdefault("kv", AccountConfig.model_validate(kv["account"]))
    return out


def _account(graph: Graph, plan: Plan, role: str, account: Account, where: str) -> Iterator[Finding]:
    yield from address(account.url, where)
    container = next(s.container for s in plan.storage if s.role == role)
    account.probe(container)
    if role == "weights":
        yield from cannot_write(account, container, where)
        yield from rate(graph, plan, account, where)
    else:
        yield from can_write(account, container, where)
    if role == "kv":
        yield from forgets(account, container, where)


def address(url: str, where: str) -> Iterator[Finding]:
    host = urlsplit(url).hostname or ""
    if loopback(host):
        return
    try:
        found = {str(x[4][0]) for x in socket.getaddrinfo(host, 443, proto=socket.IPPROTO_TCP)}
    except OSError as e:
        yield Finding(
            "LIVE-DNS", f"{host} has no address", where, str(e), "check the account's name and the cluster's DNS"
        )
        return
    public = sorted(a for a in found if not ipaddress.ip_address(a.partition("%")[0]).is_private)
    if public:
        yield Finding(
            "LIVE-PUBLIC-ADDRESS",
            f"{host} is reached over a public address",
            where,
            f"{', '.join(public)}: the private endpoint or its DNS zone is missing here",
            "link the zone privatelink.blob.core.windows.net to this network",
            "warning",
        )


def cannot_write(account: Account, container: str, where: str) -> Iterator[Finding]:
    name = f"check/{uuid.uuid4().hex}"
    try:
        account.create(container, name, b"dynamo check: this write must be refused")
    except StorageError as e:
        if e.code not in ("STORAGE-FORBIDDEN", "STORAGE-UNAUTHENTICATED"):
            raise
        return
    with suppress(StorageError):
        account.delete(container, name)
    yield Finding(
        "LIVE-RIGHTS-TOO-WIDE",
        "the serving identity can write weights",
        where,
        f"a write to {account.uri(container)} as {account.identity} succeeded: a compromised worker could replace a release",
        "give it Storage Blob Data Reader on the weights account",
    )


def can_write(account: Account, container: str, where: str) -> Iterator[Finding]:
    name = f"check/{uuid.uuid4().hex}"
    try:
        account.create(container, name, b"dynamo check")
        if account.get(container, name) != b"dynamo check":
            yield Finding(
                "LIVE-KV-READ",
                "the KV account returned other bytes than were written",
                where,
                account.uri(container),
                "do not use this account",
            )
        account.delete(container, name)
    except StorageError as e:
        yield Finding(
            "LIVE-RIGHTS-TOO-NARROW",
            "the serving identity cannot read, write and delete KV",
            where,
            f"{e.code}: {e.why or e.what} (as {account.identity})",
            "give it Storage Blob Data Contributor on the KV account",
        )


def forgets(account: Account, container: str, where: str) -> Iterator[Finding]:
    """A purge must be final: no soft delete, no versions."""
    try:
        with account.errors(container):
            kept = account.service.get_service_properties().get("delete_retention_policy")
        if kept is not None and getattr(kept, "enabled", False):
            yield Finding(
                "LIVE-KV-SOFT-DELETE",
                "the KV account keeps deleted blobs",
                where,
                f"soft delete for {kept.days} days: a purge would not be provable",
                "switch blob soft delete off on the KV account",
            )
    except StorageError as e:
        yield Finding(
            "LIVE-KV-PROPERTIES",
            "the KV account's properties cannot be read",
            where,
            f"{e.code}: soft delete is unknown to this identity",
            "check by hand: az storage account blob-service-properties show",
            "info",
        )
    name = f"check/{uuid.uuid4().hex}"
    with account.errors(container, name):
        answer = account.blob(container, name).upload_blob(b"dynamo check")
        account.delete(container, name)
    if answer.get("version_id"):
        yield Finding(
            "LIVE-KV-VERSIONS",
            "the KV account keeps versions",
            where,
            f"a write got version {answer['version_id']}: what is purged lives on as a version",
            "switch versioning off on the KV account",
        )


def rate(graph: Graph, plan: Plan, account: Account, where: str) -> Iterator[Finding]:
    """Ranged reads of the release at the concurrency the plan would use: bytes/s and p99 latency."""
    workers = [p for p in plan.processes if p.component in ("prefill", "decode", "aggregated")]
    lanes = min(PROBES_MOST, sum((p.config or {})["weights"]["range_in_flight"] for p in workers))
    layout = Layout(graph.spec.storage.weights.container)
    blobs = [b for b in _some(account, layout.container) if b.size >= PROBE_BYTES]
    if not blobs:
        return
    blob = max(blobs, key=lambda b: b.size)
    offsets = [i * PROBE_BYTES % max(1, blob.size - PROBE_BYTES) for i in range(2 * lanes)]

    def one(offset: int) -> float:
        began = time.monotonic()
        account.get(layout.container, blob.name, offset, PROBE_BYTES)
        return time.monotonic() - began

    began = time.monotonic()
    with ThreadPoolExecutor(lanes) as pool:
        times = sorted(pool.map(one, offsets))
    seconds = time.monotonic() - began
    speed, p99 = len(times) * PROBE_BYTES / seconds, times[min(len(times) - 1, int(0.99 * len(times)))]
    text = f"{speed / 1e6:.0f} MB/s, p99 {p99 * 1e3:.0f} ms of {PROBE_BYTES >> 20} MiB ranges, {lanes} in flight"
    if speed < SLOW_BYTES_PER_S:
        yield Finding(
            "LIVE-SLOW",
            "the weights account is slow from here",
            where,
            text,
            "check the region and the network between",
            "warning",
        )
    else:
        yield Finding("LIVE-RATE", "measured", where, text, severity="info")


def _some(account: Account, container: str) -> list[Any]:
    out = []
    for blob in account.list(container, "objects/"):
        out.append(blob)
        if len(out) == 100:
            break
    return out


def planes(graph: Graph) -> Iterator[Finding]:
    runtime = graph.spec.runtime
    for key, url in (("etcd_url", runtime.etcd_url), ("nats_url", runtime.nats_url)):
        if not url:
            continue
        parts = urlsplit(url)
        try:
            socket.create_connection((parts.hostname or "", parts.port or 0), 3.0).close()
        except (OSError, ValueError) as e:
            yield Finding(
                "LIVE-PLANE",
                f"{key} cannot be reached",
                graph.place("runtime", key),
                f"{url}: {e}",
                "start it, or correct the URL",
            )
