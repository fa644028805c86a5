"""The proxy that other proofs stand on: it breaks exactly what it says and counts exactly what it sends."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.standin import StandIn
from tests.faults.proxy import FaultProxy, Rule

DATA = bytes(range(256)) * 4000


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[FaultProxy]:
    (tmp_path / "store/c").mkdir(parents=True)
    (tmp_path / "store/c/blob").write_bytes(DATA)
    (tmp_path / "store/c/other").write_bytes(DATA[::-1])
    server = StandIn(tmp_path / "store").start()
    with FaultProxy("127.0.0.1", server.port, seed=1, log=tmp_path / "log") as p:
        yield p
    server.close()


def get(
    proxy: FaultProxy, begin: int = 0, end: int = 500_000, timeout: float = 5.0
) -> tuple[int, bytes, dict[str, str]]:
    c = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout)
    try:
        c.request("GET", "/standin/c/blob?sig=secret", headers={"x-ms-range": f"bytes={begin}-{end - 1}"})
        answer = c.getresponse()
        return answer.status, answer.read(), dict(answer.headers)
    finally:
        c.close()


def test_without_rules_it_is_transparent_and_counts(proxy: FaultProxy, tmp_path: Path) -> None:
    assert get(proxy)[:2] == (206, DATA[:500_000])
    assert get(proxy, 10, 20)[:2] == (206, DATA[10:20])
    assert (proxy.requests, proxy.body_bytes) == (2, 500_010)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(e["sent"], e["range"], e["status"]) for e in lines] == [
        (500_000, "bytes=0-499999", 206),
        (10, "bytes=10-19", 206),
    ]
    assert "secret" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("kind", "status"), [("busy", 503), ("throttle", 429), ("expired", 403), ("forbidden", 403), ("missing", 404)]
)
def test_canned_answers_and_times(proxy: FaultProxy, kind: str, status: int) -> None:
    proxy.rules = [Rule(kind, times=2, skip=1, seconds=3)]
    assert [get(proxy)[0] for _ in range(4)] == [206, status, status, 206]
    assert proxy.faults == {kind: 2}


def test_body_faults(proxy: FaultProxy) -> None:
    proxy.rules = [Rule("flip", after=1234, times=1)]
    body = get(proxy)[1]
    assert [i for i in range(500_000) if body[i] != DATA[i]] == [1234]
    proxy.rules = [Rule("truncate", by=7, times=1)]
    status, body, fields = get(proxy)
    assert (status, body, fields["Content-Length"]) == (206, DATA[:499_993], "499993")
    proxy.rules = [Rule("other", target="/standin/c/other", times=1)]
    assert get(proxy)[1] == DATA[::-1][:500_000]
    proxy.rules = [Rule("zero", times=1)]
    assert get(proxy)[1] == bytes(500_000)
    proxy.rules = [Rule("cut", after=1000, times=1)]
    with pytest.raises(http.client.IncompleteRead) as e:
        get(proxy)
    assert e.value.partial == DATA[:1000]
    proxy.rules = [Rule("reset", after=-1, times=1)]
    with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
        get(proxy)
    proxy.rules = [Rule("garbage", times=1)]
    with pytest.raises(http.client.BadStatusLine):
        get(proxy)
    proxy.rules = []
    assert get(proxy)[1] == DATA[:500_000]


def test_time_faults(proxy: FaultProxy) -> None:
    proxy.rules = [Rule("stall", after=1000)]
    with pytest.raises(socket.timeout):
        get(proxy, timeout=0.5)
    for rule in (Rule("delay", seconds=0.5), Rule("cap", rate=1_000_000)):
        proxy.rules = [rule]
        began = time.monotonic()
        assert get(proxy)[1] == DATA[:500_000]
        assert time.monotonic() - began >= 0.45


def test_same_seed_same_faults(proxy: FaultProxy) -> None:
    def run(seed: int) -> list[int]:
        with FaultProxy(*proxy.upstream, seed=seed) as p:
            p.rules = [Rule("busy", chance=0.5)]
            return [get(p, 0, 1)[0] for _ in range(12)]

    assert run(3) == run(3) != run(4)


def test_rules_over_http_and_unknown_kinds_are_refused(proxy: FaultProxy) -> None:
    c = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
    c.request("PUT", "/__faults__", body=json.dumps([{"kind": "busy", "times": 1}]))
    assert json.loads(c.getresponse().read())["rules"][0]["kind"] == "busy"
    assert get(proxy)[0] == 503
    with pytest.raises(ValueError, match="no fault 'bussy'"):
        Rule("bussy")
