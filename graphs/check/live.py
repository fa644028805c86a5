"""`dynamo check --live`: asks the accounts and planes of a graph, as they are now, under the identities components use.

Rights must suffice and not exceed: a serving identity that can write weights is an error, because then
one compromised worker could put weights into service. No data-plane call tells an account's region: it is judged by
the round trip, and where the graph names `cluster.region` the machine's own is asked of its metadata service.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from components.common.registry.layout import Layout
from components.common.storage.account import Account
from components.common.storage.config import AccountConfig
from components.common.storage.errors import StorageError
from graphs.check.planes import planes
from graphs.check.storage import loopback
from graphs.compile import compile_plan
from graphs.launch import runs
from graphs.load import Finding, Graph, read_graph
from graphs.plan import Plan
from graphs.site import Site

PROBE_BYTES, PROBES_MOST = 1 << 20, 64
FAR_S = 0.02
"""Best round trip of a small request: within a region 2-6 ms, to another one its distance on top."""
METADATA = "http://169.254.169.254/metadata/instance/compute/location?api-version=2021-02-01&format=text"
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
    out = [*planes(graph), *region(graph)]
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
    yield from distance(account, container, where)
    if role == "weights":
        yield from cannot_write(account, container, where)
        yield from rate(graph, plan, account, where)
    else:
        wrong = list(can_write(account, container, where))
        yield from wrong
        if not wrong:
            yield from forgets(account, container, where)
            yield from kv_rate(plan, account, container, where)


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


def region(graph: Graph) -> Iterator[Finding]:
    """Whether this machine stands in the region the graph names; nothing where no metadata service answers (not on Azure)."""
    wanted = graph.spec.cluster.region if graph.spec.cluster else ""
    if not wanted:
        return
    try:
        ask = urllib.request.Request(METADATA, headers={"Metadata": "true"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(ask, timeout=2) as answer:
            here = answer.read(100).decode("ascii", "replace").strip()
    except OSError:
        return
    if here.lower() != wanted.lower().replace(" ", ""):
        yield Finding(
            "LIVE-REGION",
            "this machine stands in another region than the graph names",
            graph.place("cluster", "region"),
            f"here {here}, cluster.region {wanted}: what is measured here is not what the cluster gets",
            "ask from the cluster, or correct cluster.region",
            "warning",
        )


def distance(account: Account, container: str, where: str) -> Iterator[Finding]:
    """Best of a few round trips: an account in another region answers at its distance, every time."""
    best = min(_seconds(lambda: account.find(container, "check/none")) for _ in range(8))
    if best > FAR_S:
        yield Finding(
            "LIVE-FAR",
            "the account is far from here",
            where,
            f"best round trip {best * 1e3:.0f} ms: another region, or a proxy between; every KV lookup pays it",
            "use an account in the region of the nodes",
            "warning",
        )


def _seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


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
    yield measured("weights", lanes, [(layout.container, blob.name, at) for at in offsets], account, where)


def kv_rate(plan: Plan, account: Account, container: str, where: str) -> Iterator[Finding]:
    """The same of the KV account, on objects written for it and deleted: reads as many as one worker's tier has in flight."""
    settings = next(k["settings"] for p in plan.processes if (k := (p.config or {}).get("kv")))
    lanes = min(PROBES_MOST, int(settings.get("threads", 16)))
    names = [f"check/{uuid.uuid4().hex}" for _ in range(4)]
    try:
        for name in names:
            account.create(container, name, os.urandom(PROBE_BYTES))
        yield measured("kv", lanes, [(container, names[i % 4], 0) for i in range(2 * lanes)], account, where)
    finally:
        for name in names:
            with suppress(StorageError):
                account.delete(container, name)


def measured(role: str, lanes: int, reads: list[tuple[str, str, int]], account: Account, where: str) -> Finding:
    began = time.monotonic()
    with ThreadPoolExecutor(lanes) as pool:
        times = sorted(pool.map(lambda r: _seconds(lambda: account.get(r[0], r[1], r[2], PROBE_BYTES)), reads))
    seconds = time.monotonic() - began
    speed, p99 = len(times) * PROBE_BYTES / seconds, times[min(len(times) - 1, int(0.99 * len(times)))]
    text = f"{speed / 1e6:.0f} MB/s, p99 {p99 * 1e3:.0f} ms of {PROBE_BYTES >> 20} MiB ranges, {lanes} in flight"
    if speed >= SLOW_BYTES_PER_S:
        return Finding("LIVE-RATE", f"{role}: measured", where, text, severity="info")
    return Finding(
        "LIVE-SLOW", f"the {role} account is slow from here", where, text, "check the region and the network between", "warning"
    )  # fmt: skip


def _some(account: Account, container: str) -> list[Any]:
    out = []
    for blob in account.list(container, "objects/"):
        out.append(blob)
        if len(out) == 100:
            break
    return out
