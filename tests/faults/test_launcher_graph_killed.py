"""kill -9 of each component in turn while 20 streams run: every request ends whole or with a clear error, in time. (P7)"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.e2e.mockgraph import Served, serving, until

pytestmark = pytest.mark.slow

STREAMS, TOKENS, DEADLINE_S = 20, 60, 45.0
INVISIBLE = ("prefill-0", "decode-0", "router-0", "weights-0", "azurite-0", "events-0")
"""With a second worker of each kind, these deaths cost no request."""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    sets = ("components.prefill.replicas=2", "components.decode.replicas=2", "engine.mock_token_ms=20")
    more = tuple(
        f"components.{c}.restarts=20" for c in ("prefill", "decode", "router", "weights", "frontend", "dynamo_frontend")
    )
    with serving("mock", tmp_path_factory.mktemp("k") / "state", *sets, *more) as served:
        yield served


@dataclass
class Outcome:
    """What a client saw of one stream."""

    text: str = ""
    chunks: int = 0
    finished: bool = False
    done: bool = False
    error: str = ""
    seconds: float = 0.0
    ends: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        if self.finished and self.done and not self.error:
            return "whole"
        return "error" if self.error else "torn"


def lines(answer: http.client.HTTPResponse) -> Iterator[str]:
    """Lines of a chunked answer. Iterating the response itself would take a cut connection for its end."""
    rest = b""
    while piece := answer.read1(65536):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (x.decode().strip() for x in whole)


def stream(graph: Served, number: int, out: Outcome) -> None:
    began = time.monotonic()
    c = http.client.HTTPConnection("127.0.0.1", graph.port, timeout=DEADLINE_S)
    try:
        body = {
            "model": "mock",
            "stream": True,
            "max_tokens": TOKENS,
            "temperature": 0,
            "messages": [{"role": "user", "content": f"story number {number} " * 8}],
        }
        c.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = c.getresponse()
        if answer.status != 200:
            out.error = f"HTTP {answer.status}: {answer.read()[:200]!r}"
            return
        for line in lines(answer):
            if line == "data: [DONE]":
                out.done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    out.error = json.dumps(event["error"])[:200]
                for choice in event.get("choices", []):
                    piece = (choice.get("delta") or {}).get("content") or ""
                    out.text += piece
                    out.chunks += bool(piece)
                    if choice.get("finish_reason"):
                        out.finished = True
                        out.ends.append(choice["finish_reason"])
    except (OSError, http.client.HTTPException) as e:
        out.error = f"connection: {type(e).__name__}"
    finally:
        out.seconds = time.monotonic() - began
        c.close()


def twenty(graph: Served, victim: str = "") -> list[Outcome]:
    outcomes = [Outcome() for _ in range(STREAMS)]
    threads = [threading.Thread(target=stream, args=(graph, i, o)) for i, o in enumerate(outcomes)]
    for t in threads:
        t.start()
    if victim:
        pid = graph.row(victim)["pid"]
        until(lambda: sum(o.chunks > 0 for o in outcomes) >= STREAMS // 2, DEADLINE_S, "half of the streams have begun")
        os.kill(pid, signal.SIGKILL)
    for t in threads:
        t.join(DEADLINE_S + 10)
        assert not t.is_alive(), "a stream hangs"
    return outcomes


@pytest.fixture(scope="module")
def expected(graph: Served) -> list[str]:
    """The answers without a fault: the mock's answer depends on the prompt alone."""
    outcomes = twenty(graph)
    assert Counter(o.kind for o in outcomes) == {"whole": STREAMS}
    return [o.text for o in outcomes]


@pytest.mark.parametrize(
    "victim",
    ["prefill-0", "decode-0", "router-0", "weights-0", "azurite-0", "events-0", "dynamo-frontend-0", "frontend-0"],
)
def test_kill_9_under_twenty_streams(graph: Served, expected: list[str], victim: str) -> None:
    restarts = graph.row(victim)["restarts"]
    outcomes = twenty(graph, victim)
    kinds = Counter(o.kind for o in outcomes)
    assert kinds["torn"] == 0, [o for o in outcomes if o.kind == "torn"]
    assert max(o.seconds for o in outcomes) < DEADLINE_S
    for outcome, text in zip(outcomes, expected, strict=True):
        assert len(outcome.ends) <= 1, "answered twice"
        if outcome.kind == "whole":
            assert outcome.text == text, "an answer that was moved to another worker is another answer"
    if victim in INVISIBLE:
        assert kinds == {"whole": STREAMS}, [o.error for o in outcomes if o.error]
    until(
        lambda: graph.row(victim)["state"] == "ready" and graph.row(victim)["restarts"] == restarts + 1,
        90,
        f"{victim} is back",
    )
    until(lambda: graph.chat("back")[0] == 200, 60, "the graph answers again")
    assert all(p["state"] in ("ready", "unready") for p in graph.status()["processes"])
