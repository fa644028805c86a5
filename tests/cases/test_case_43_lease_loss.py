"""Case 43 (dynamo#11855, #3493): advertised before routable; a lost lease never came back.

The planes of a cluster for real: etcd discovery, NATS events, the mock engine behind the real gateway, router and
Dynamo frontend. One graph for the module; each test leaves it healthy for the next.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import aiohttp
import pytest

from tests import planes
from tests.e2e.graph import TINY, Graph, base_port, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECOVER_S = 90
"""Longest time to the next good answer: an etcd lease (10 to 30 s here), back-off, and a slow machine."""


class Cluster:
    def __init__(self, graph: Graph, etcd: planes.Plane, nats: planes.Plane) -> None:
        self.graph, self.etcd, self.nats = graph, etcd, nats

    async def answer(self) -> str:
        body = await self.graph.ask(
            messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=4, temperature=0
        )
        return str(body["choices"][0]["message"]["content"])

    async def recovers(self) -> float:
        """Seconds until three answers in a row are good."""
        start, good = time.monotonic(), 0
        while good < 3:
            try:
                good = good + 1 if await self.answer() else 0
            except (AssertionError, aiohttp.ClientError, TimeoutError, ValueError) as e:
                good, why = 0, e
                assert time.monotonic() - start < RECOVER_S, f"no answer after {RECOVER_S} s: {why}"
                await asyncio.sleep(0.5)
        return time.monotonic() - start

    async def instances(self) -> int:
        """Endpoints that hold a lease in etcd, asked of etcd itself."""
        first, last = (base64.b64encode(k).decode() for k in (b"v1/instances/", b"v1/instances0"))
        url, question = (
            f"http://127.0.0.1:{self.etcd.port}/v3/kv/range",
            {"key": first, "range_end": last, "keys_only": True},
        )
        async with aiohttp.ClientSession() as http, http.post(url, json=question) as r:
            return int((await r.json()).get("count", 0))

    async def until_instances(self, wanted: Callable[[int], bool], what: str) -> float:
        """Seconds until the number of leased endpoints is as wanted."""
        start = time.monotonic()
        while not wanted(count := await self.instances()):
            assert time.monotonic() - start < RECOVER_S, f"{what}: {count} endpoints"
            await asyncio.sleep(0.25)
        return time.monotonic() - start

    def pid(self, name: str) -> int:
        return int(next(p["pid"] for p in self.graph.status()["processes"] if p["name"] == name))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("planes")
    port = int(os.environ.get("DYNAMO_BLOB_TEST_PORT", base_port()))
    etcd, nats = planes.etcd(port + 90, directory), planes.nats(port + 92, directory)
    still = (
        "components.decode.frozen_s=0",
        "components.prefill.frozen_s=0",
    )  # else the launcher is faster than the lease
    sets = (*still, f"runtime.etcd_url=http://127.0.0.1:{etcd.port}", f"runtime.nats_url=nats://127.0.0.1:{nats.port}")
    try:
        etcd.start()
        nats.start()
        with served(
            "mock-cluster", directory / "state", model="tiny-full", directory=TINY, profile="mock", sets=sets, port=port
        ) as graph:
            graph.model = "mock"
            yield Cluster(graph, etcd, nats)
    finally:
        nats.stop()
        etcd.stop()


async def test_answers_as_soon_as_it_says_ready_and_the_same_every_time(cluster: Cluster) -> None:
    """`served` returned when /health was good: the first request after it must be served (advertised = routable)."""
    first = await cluster.answer()
    assert first and {await cluster.answer() for _ in range(3)} == {first}
    plan = cluster.graph.plan()
    assert (plan["discovery"], plan["event_plane"]) == ("etcd", "nats")


async def test_nats_restarted(cluster: Cluster) -> None:
    """Events are hints: requests go on while NATS is away, and events flow again after it came back."""
    cluster.nats.stop()
    assert [bool(await cluster.answer()) for _ in range(3)] == [True] * 3
    cluster.nats.start()
    assert await cluster.recovers() < RECOVER_S


async def test_etcd_restarted(cluster: Cluster) -> None:
    """Known workers are served while etcd is away; leases outlive a restart with its data."""
    cluster.etcd.stop()
    assert [bool(await cluster.answer()) for _ in range(3)] == [True] * 3
    cluster.etcd.start()
    assert await cluster.recovers() < RECOVER_S


@pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
async def test_a_lost_lease_is_regained(cluster: Cluster, worker: str) -> None:
    """A worker that stands still longer than its lease is taken out, and is back when it goes on: by itself or restarted."""
    before, pid = await cluster.instances(), cluster.pid(worker)
    assert before >= 2
    os.kill(pid, signal.SIGSTOP)
    try:
        lost = await cluster.until_instances(lambda n: n < before, "a worker that stands still was advertised for ever")
    finally:
        with contextlib.suppress(ProcessLookupError):  # the launcher ends what stands still for longer than frozen_s
            os.kill(pid, signal.SIGCONT)
    took = await cluster.recovers()
    back = await cluster.until_instances(lambda n: n >= before, "the lease never came back")
    print(f"{worker}: lease lost after {lost:.1f} s, answers {took:.1f} s later, lease back {back:.1f} s after that")


async def test_etcd_away_for_longer_than_every_lease(cluster: Cluster) -> None:
    """Nobody can renew for longer than a lease lives: whoever lost one registers again."""
    before = await cluster.instances()
    cluster.etcd.stop()
    await asyncio.sleep(35)  # the measured life of a lease is 30 s
    cluster.etcd.start()
    took = await cluster.recovers()
    back = await cluster.until_instances(lambda n: n >= before, "endpoints are missing")
    print(f"answers {took:.1f} s after etcd came back, all endpoints {back:.1f} s after that")
