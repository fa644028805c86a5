"""What the gateway adds to Dynamo's bare frontend: latency, requests/s, the 40 ms stall; with and without a decision.

Variants, all before one and the same frontend and mock workers (no token delay: only differences count):
  bare      Dynamo's frontend itself (--router-mode kv)
  gateway   the gateway without a router
  decision  the gateway asking the router and pinning the prefill worker
  traced    as decision, worker ids asked of Dynamo on every request (trace_share 1)
Requests go one by one, the variants in random order per round, so that a noisy machine hits all alike; `paired` rows
are the differences to `bare` within a round. Goals: median +1.5 ms without, +3 ms with a decision; nothing per token.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.client import Connection
from bench.mockgraph import SERVED, MockGraph, free_ports, get, wait
from bench.report import Report

WORDS = 100
STALL_S = 0.035
PATH = "/v1/chat/completions"


def bench(report: Report, quick: bool) -> None:
    rounds = 60 if quick else 300
    with tempfile.TemporaryDirectory(prefix="dynamo-blob-bench-") as scratch:
        graph = MockGraph(Path(scratch), prefill=2, decode=2, gateway={"trace_share": 0.0})
        decision, plain, traced = graph.gateway_port, *free_ports_after(graph, 2)
        with graph:
            graph.start_gateway("gateway-plain", listen=f"127.0.0.1:{plain}", router="")
            graph.start_gateway("gateway-traced", listen=f"127.0.0.1:{traced}", trace_share=1.0)
            for port in (plain, traced):
                wait("gateways", lambda p=port: get(f"http://127.0.0.1:{p}/health")[0] == 200)  # type: ignore[misc]
            ports = {"bare": graph.frontend_port, "gateway": plain, "decision": decision, "traced": traced}
            rng = random.Random(report.seed)
            for tokens in (8, 128):
                for fresh in (False, True):
                    _latency(report, ports, rng, tokens, fresh, rounds)
            for tokens in (8, 128):
                _throughput(report, ports, rng, tokens, 3 if quick else 6, 3.0 if quick else 6.0)
            _stalls(report, ports, 100)
    _verdict(report)


def free_ports_after(graph: MockGraph, n: int) -> list[int]:
    taken = {
        graph.frontend_port,
        graph.gateway_port,
        graph.router_http,
        graph.frontend_system,
        *graph.system_ports.values(),
        *graph._spare,
    }
    return [p for p in free_ports(len(taken) + n) if p not in taken][:n]


def _body(rng: random.Random, tokens: int) -> dict[str, Any]:
    text = " ".join(
        rng.choice(("river", "stone", "cloud", "green", "seven", "market", "winter", "paper")) for _ in range(WORDS)
    )
    return {
        "model": SERVED,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "stream": True,
        "temperature": 0,
    }


def _latency(report: Report, ports: dict[str, int], rng: random.Random, tokens: int, fresh: bool, rounds: int) -> None:
    cell = f"{tokens} tok, {'fresh' if fresh else 'reused'}"
    connections = {name: Connection(port, quick_ack=True) for name, port in ports.items()}
    for i in range(-3, rounds):
        body, times = _body(rng, tokens), {}
        for name in rng.sample(list(ports), len(ports)):
            answer = connections[name].post(PATH, body)
            if answer.status != 200 or not answer.body.rstrip().endswith(b"[DONE]"):
                raise RuntimeError(f"{name}: {answer.status} {answer.body[-300:]!r}")
            times[name] = answer.total_s * 1e3
            if fresh:
                connections[name].close()
        if i < 0:
            continue  # warm-up
        for name, ms in times.items():
            report.add(cell, name, i, ms, "ms")
            if name != "bare":
                report.add(f"{cell}, paired", name, i, ms - times["bare"], "ms")
    for c in connections.values():
        c.close()


def _throughput(
    report: Report, ports: dict[str, int], rng: random.Random, tokens: int, rounds: int, seconds: float
) -> None:
    for i in range(rounds):
        for name in rng.sample(list(ports), len(ports)):
            report.add(f"{tokens} tok, 8 clients", name, i, _rate(ports[name], tokens, seconds, rng.random()), "req/s")


def _rate(port: int, tokens: int, seconds: float, seed: float) -> float:
    counts = [0] * 8
    end = time.perf_counter() + seconds

    def client(k: int) -> None:
        rng, connection = random.Random(f"{seed}.{k}"), Connection(port, quick_ack=True)
        while time.perf_counter() < end:
            if connection.post(PATH, _body(rng, tokens)).status == 200:
                counts[k] += 1
        connection.close()

    threads = [threading.Thread(target=client, args=(k,)) for k in range(8)]
    started = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return sum(counts) / (time.perf_counter() - started)


def _stalls(report: Report, ports: dict[str, int], requests: int) -> None:
    """First bytes later than 35 ms, back to back on one connection, from a client that acknowledges as it likes."""
    rng = random.Random(1)
    for name, port in ports.items():
        connection = Connection(port)
        late = sum(connection.post(PATH, _body(rng, 8)).first_s > STALL_S for _ in range(requests))
        connection.close()
        report.add("stalls in 100, plain client", name, 0, float(late), "requests")


def _verdict(report: Report) -> None:
    def med(cell: str, variant: str) -> float:
        return median(r["value"] for r in report.rows if r["cell"] == cell and r["variant"] == variant)

    for variant, goal in (("gateway", 1.5), ("decision", 3.0), ("traced", 3.0)):
        for conn in ("reused", "fresh"):
            short, long = med(f"8 tok, {conn}, paired", variant), med(f"128 tok, {conn}, paired", variant)
            report.note(
                f"{variant}, {conn}: +{short:.2f} ms at 8 tokens (goal {goal}), +{(long - short) / 120 * 1e3:.1f} us a token"
            )
