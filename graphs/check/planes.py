"""`dynamo check --live`: the planes of a cluster, asked as Dynamo uses them, not merely connected to.

etcd must keep a key under a lease and give it back, and raise no alarm: an etcd out of space answers reads and
refuses every lease, so that workers start and are never found. NATS must carry a message from one subscription to another.
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit

from graphs.load import Finding, Graph

TIMEOUT_S = 3.0
LEASE_S = 10


def planes(graph: Graph) -> Iterator[Finding]:
    """Findings of the planes the graph names; `info` with version and round trip of those that work."""
    runtime = graph.spec.runtime
    for key, url, ask in (("etcd_url", runtime.etcd_url, etcd), ("nats_url", runtime.nats_url, nats)):
        if not url:
            continue
        where = graph.place("runtime", key)
        try:
            text = ask(url)
        except Exception as e:
            yield Finding(
                "LIVE-PLANE", f"{key} does not serve", where, f"{url}: {_reason(e)}", "start it, mend it, or correct the URL"
            )  # fmt: skip
        else:
            yield Finding("LIVE-PLANE-OK", f"{key} serves", where, text, severity="info")


def etcd(url: str) -> str:
    """Version and round trip of a write under a lease. Raises what is wrong."""
    import pyetcd

    host, port, tls = _address(url)
    if tls:
        return "connected (certificates are not asked for a lease)"
    client = pyetcd.client(host=host, port=port, timeout=TIMEOUT_S)
    try:
        version = client.status().version
        alarms = [f"{a.alarm_type}" for a in client.list_alarms()]
        if alarms:
            raise RuntimeError(
                f"alarms are raised ({', '.join(alarms)}): it refuses writes; compact, defragment, disarm"
            )
        key = f"dynamo-blob/check/{uuid.uuid4().hex}"
        began = time.monotonic()
        lease = client.lease(LEASE_S)
        try:
            client.put(key, "check", lease=lease)
            if client.get(key)[0] != b"check":
                raise RuntimeError("it does not give back what it was given")
            took = time.monotonic() - began
        finally:
            lease.revoke()
        if client.get(key)[0] is not None:
            raise RuntimeError("a key outlives its lease: dead workers would stay listed")
        return f"etcd {version}, lease and write {took * 1e3:.1f} ms"
    finally:
        client.close()


def nats(url: str) -> str:
    """Version and round trip of a message. Raises what is wrong."""
    import nats as client

    async def ask() -> str:
        async def quiet(_: Exception) -> None: ...

        _address(url)
        connection = await client.connect(url, connect_timeout=int(TIMEOUT_S), allow_reconnect=False, error_cb=quiet)
        try:
            subject = f"dynamo_blob.check.{uuid.uuid4().hex}"
            heard = await connection.subscribe(subject, max_msgs=1)
            began = time.monotonic()
            await connection.publish(subject, b"check")
            await heard.next_msg(timeout=TIMEOUT_S)
            v = connection.connected_server_version
            return f"NATS {v.major}.{v.minor}.{v.patch}, message {1e3 * (time.monotonic() - began):.1f} ms"
        finally:
            await connection.close()

    return asyncio.run(asyncio.wait_for(ask(), 3 * TIMEOUT_S))


def _address(url: str) -> tuple[str, int, bool]:
    """(host, port, TLS), reachable. Raises OSError, ValueError."""
    parts = urlsplit(url)
    if not parts.hostname or not parts.port:
        raise ValueError("host and port are expected")
    socket.create_connection((parts.hostname, parts.port), TIMEOUT_S).close()
    return parts.hostname, parts.port, parts.scheme in ("https", "tls")


def _reason(e: Exception) -> str:
    return f"{type(e).__name__}: {e}"[:300].rstrip(": ")
