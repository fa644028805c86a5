"""One real graph for a test module: `dynamo serve` as a user starts it, in a state directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[2]
DYNAMO = [sys.executable, "-m", "graphs.cli.main"]
SAMPLE = ROOT / ".state/models/smollm2-135m-instruct"
TINY = ROOT / ".state/models/tiny-full"
START_S, STOP_S = 420, 90


def short_directory() -> Path:
    """A state directory that the test removes itself."""
    return Path(tempfile.mkdtemp(prefix="db-"))


class Graph:
    """A served graph. `ask` and `stream` talk to it as any OpenAI client would."""

    def __init__(self, state: Path, port: int, model: str, log: Path) -> None:
        self.state, self.model, self.log = state, model, log
        self.url = f"http://127.0.0.1:{port}"

    def status(self) -> dict[str, Any]:
        done = subprocess.run(
            [*DYNAMO, "status", "--state", str(self.state), "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return json.loads(done.stdout)

    def plan(self) -> dict[str, Any]:
        return json.loads((Path(self.status()["run_dir"]) / "plan.json").read_text())

    def process(self, name: str) -> dict[str, Any]:
        return next(p for p in self.plan()["processes"] if p["name"] == name)

    async def counters(self, name: str) -> dict[str, float]:
        """The worker's own Prometheus counters, summed over labels but `source`."""
        port = next(p["number"] for p in self.process(name)["ports"] if p["name"] == "system")
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/metrics") as r:
            text = await r.text()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("vllm:"):
                key, _, value = line.rpartition(" ")
                bare, _, labels = key.partition("{")
                source = labels.split('source="')[1].split('"')[0] if 'source="' in labels else ""
                found[f"{bare}:{source}" if source else bare] = found.get(
                    f"{bare}:{source}" if source else bare, 0
                ) + float(value)
        return found

    async def ask(self, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                self.url + path, json={"model": self.model, **body}, timeout=aiohttp.ClientTimeout(total=300)
            ) as r,
        ):
            answer = await r.json()
            assert r.status == 200, answer
            return answer

    async def stream(self, **body: Any) -> list[dict[str, Any]]:
        chunks = []
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                self.url + "/v1/chat/completions", json={"model": self.model, "stream": True, **body},
                timeout=aiohttp.ClientTimeout(total=300),
            ) as r,
        ):  # fmt: skip
            assert r.status == 200, await r.text()
            async for line in r.content:
                text = line.decode().strip()
                if text.startswith("data: ") and text != "data: [DONE]":
                    chunks.append(json.loads(text[6:]))
        return chunks


def base_port() -> int:
    """A block of ports of this test process (xdist worker), away from the shipped graphs' own."""
    return 22000 + 200 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])


def settings(port: int, model: str, directory: Path, profile: str) -> list[str]:
    values = {
        "network.base_port": port + 10,
        "components.frontend.listen": f"127.0.0.1:{port}",
        "model.name": model,
        "model.source": directory,
        "engine.profile": profile,
    }
    return [x for k, v in values.items() for x in ("--set", f"{k}={v}")]


@contextlib.contextmanager
def served(
    graph: str, state: Path, *, model: str = "smollm2-135m-instruct", directory: Path = SAMPLE,
    profile: str = "smollm2-135m-cpu", sets: tuple[str, ...] = (), port: int | None = None,
) -> Iterator[Graph]:  # fmt: skip
    """Start, wait until a request would succeed, yield, stop; fails when anything of it is left."""
    port = port or base_port()
    log = state / f"{graph}.log"
    state.mkdir(parents=True, exist_ok=True)
    argv = [
        *DYNAMO, "serve", f"graphs/{graph}.yaml", "--quiet", "--state", str(state), *settings(port, model, directory, profile),
        *[x for s in sets for x in ("--set", s)],
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    served_graph = Graph(state, port, model, log)
    try:
        _wait_ready(process, served_graph)
        yield served_graph
    finally:
        process.send_signal(signal.SIGINT)
        try:
            code: int | None = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            code = None
        assert code is not None, f"the launcher did not stop in {STOP_S} s:\n{log.read_text()[-2000:]}"


def _wait_ready(process: subprocess.Popen[bytes], graph: Graph) -> None:
    import urllib.request

    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise AssertionError(f"the launcher ended with {process.returncode}:\n{graph.log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(graph.url + "/health", timeout=5) as r:
                if r.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"not ready in {START_S} s:\n{graph.log.read_text()[-3000:]}")
