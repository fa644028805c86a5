"""The mock graph as plain processes: Dynamo's frontend, mock workers, router, gateway; no launcher between.

For benchmarks that need two edges side by side and for tests that kill single parts. Everything listens on
loopback but Dynamo's ZMQ event sockets (facts: they always bind 0.0.0.0).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".state/models/smollm2-135m-instruct"
SERVED = "mock-model"
PORTS = os.environ.get("DYNAMO_BLOB_TEST_PORTS", "21200-21299")


def free_ports(n: int) -> list[int]:
    """`n` ports of the test range that can be bound now."""
    low, high = (int(p) for p in PORTS.split("-"))
    out: list[int] = []
    start = os.getpid() % (high - low)
    for i in range(high - low + 1):
        port = low + (start + i) % (high - low + 1)
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                s.bind(("127.0.0.1", port))
                out.append(port)
        if len(out) == n:
            return out
    raise RuntimeError(f"only {len(out)} free ports in {PORTS}")


def wait(what: str, condition: Callable[[], Any], deadline_s: float = 60.0, every_s: float = 0.05) -> Any:
    """The first true value of `condition`; TimeoutError after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {deadline_s} s")
        time.sleep(every_s)


def get(url: str, timeout: float = 5.0, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """(status, body); (0, reason) when nothing answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=timeout) as r:
            return r.status, r.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()
    except OSError as e:
        return 0, str(e).encode()


class MockGraph:
    """Context manager. `prefill`/`decode` replicas; `gateway` holds extra GatewayConfig fields, None = no gateway."""

    def __init__(
        self, directory: Path, *, prefill: int = 1, decode: int = 1, block_size: int = 16, token_ms: float = 0.0, prefill_tokens_per_s: float = 0.0,
        kv_cache_bytes: int = 1 << 28, max_model_len: int = 4096, gateway: dict[str, Any] | None = None, with_gateway: bool = True,
        with_router: bool = True, drain_s: float = 5.0, aggregated: int = 0, model: Path = MODEL, frontend_args: tuple[str, ...] = (), frontends: int = 1,
    ) -> None:  # fmt: skip
        self.dir = directory
        self.replicas = {"prefill": prefill, "decode": decode, "aggregated": aggregated}
        self.block_size, self.token_ms, self.rate = block_size, token_ms, prefill_tokens_per_s
        self.kv_cache_bytes, self.max_model_len, self.drain_s, self.model = (
            kv_cache_bytes,
            max_model_len,
            drain_s,
            model,
        )
        self.gateway_extra, self.with_gateway, self.with_router = gateway or {}, with_gateway, with_router
        self.frontend_args = frontend_args
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, tuple[list[str], dict[str, str]]] = {}
        names = [f"{role}-{i}" for role, n in self.replicas.items() for i in range(n)]
        ports = free_ports(4 + len(names) + 4 + frontends - 1)
        self.frontend_port, self.gateway_port, self.router_http, self.frontend_system = ports[:4]
        self._spare = ports[4:]
        self.more_frontends = [self._spare.pop() for _ in range(frontends - 1)]
        self.system_ports = {name: self._spare.pop() for name in names}
        self.frontend, self.gateway = f"http://127.0.0.1:{self.frontend_port}", f"http://127.0.0.1:{self.gateway_port}"
        self.router_socket = self.dir / "router.sock"

    # -- processes

    def start(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        base = {k: os.environ[k] for k in ("PATH", "HOME", "LANG", "TZ") if k in os.environ}
        base |= {
            "DYN_FILE_KV": str(self.dir / "discovery"), "DYN_DISCOVERY_BACKEND": "file", "DYN_EVENT_PLANE": "zmq", "DYN_REQUEST_PLANE": "tcp",
            "DYN_SYSTEM_HOST": "127.0.0.1", "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1", "DYN_LOG": "error", "DYN_SDK_DISABLE_ANSI_LOGGING": "1", "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        }  # fmt: skip
        log = (self.dir / f"{name}.log").open("ab")
        process = subprocess.Popen(
            argv,
            env=base | (env or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            start_new_session=True,
        )
        log.close()
        self.processes[name], self._started[name] = process, (argv, env or {})
        return process

    def plan(self, name: str, content: dict[str, Any]) -> str:
        path = self.dir / f"{name}.json"
        path.write_text(json.dumps(content, indent=1))
        return str(path)

    def start_frontend(self, name: str = "dynamo-frontend", port: int = 0) -> None:
        self.start(name, [
            sys.executable, "-m", "dynamo.frontend", "--discovery-backend", "file", "--http-host", "127.0.0.1", "--http-port", str(port or self.frontend_port),
            "--router-mode", "kv", "--migration-limit", "3", "--kv-cache-block-size", str(self.block_size), "--namespace", "mock", *self.frontend_args,
        ])  # fmt: skip

    def start_worker(self, role: str, index: int, **changes: Any) -> None:
        name = f"{role}-{index}"
        port = self.system_ports.get(name) or self.system_ports.setdefault(name, self._spare.pop())
        model = changes.pop("model", self.model)
        config = {
            "name": name, "role": role, "served_model": SERVED, "namespace": "mock", "component": "prefill" if role == "prefill" else "backend",
            "run_dir": str(self.dir), "engine_kind": "mock", "mock_token_ms": self.token_ms, "mock_prefill_tokens_per_s": self.rate, "drain_s": self.drain_s,
            "engine": {"block_size": self.block_size, "kv_cache_bytes": self.kv_cache_bytes, "max_model_len": self.max_model_len, "max_num_seqs": 256},
            "weights": {
                "release": {"model": SERVED}, "account": {"url": "http://127.0.0.1:9/unused", "credential": {"kind": "sas_file"}}, "root": str(model)
            },
        } | changes  # fmt: skip
        self.start(
            name,
            [sys.executable, "-m", "components.common.engine.mock", "--plan", self.plan(name, config)],
            {"DYN_SYSTEM_PORT": str(port)},
        )

    def start_router(self) -> None:
        config = {
            "name": "router-0", "namespace": "mock", "block_size": self.block_size, "listen": f"unix:{self.router_socket}",
            "http": f"127.0.0.1:{self.router_http}", "prefill_component": "" if self.replicas["aggregated"] else "prefill",
        }  # fmt: skip
        self.start("router", [sys.executable, "-m", "router", "--plan", self.plan("router", config)])

    def start_gateway(self, name: str = "gateway", **changes: Any) -> None:
        config = {
            "name": "frontend-0", "listen": f"127.0.0.1:{self.gateway_port}", "upstream": self.frontend, "served_model": SERVED, "model_path": str(self.model),
            "max_model_len": self.max_model_len, "block_size": self.block_size, "router": f"unix:{self.router_socket}" if self.with_router else "",
            "auth": "none", "more_upstreams": [f"http://127.0.0.1:{p}" for p in self.more_frontends],
                "engine_kind": "mock",
        } | self.gateway_extra | changes  # fmt: skip
        self.start(name, [sys.executable, "-m", "components.frontend", "--plan", self.plan(name, config)])

    def restart(self, name: str) -> None:
        """The same argv again, after the process ended or was killed."""
        argv, env = self._started[name]
        self.processes[name].wait(10)
        self.start(name, argv, env)

    def kill(self, name: str, sig: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(sig)

    # -- as a whole

    def __enter__(self) -> MockGraph:
        self.dir.mkdir(parents=True, exist_ok=True)
        try:
            self.start_frontend()
            for i, port in enumerate(self.more_frontends, 1):
                self.start_frontend(f"dynamo-frontend-{i}", port)
            for role, n in self.replicas.items():
                for i in range(n):
                    self.start_worker(role, i)
            if self.with_router:
                self.start_router()
            if self.with_gateway:
                self.start_gateway()
            self.wait_ready()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def wait_ready(self, deadline_s: float = 90.0) -> None:
        wait(
            "model listed by Dynamo's frontend",
            lambda: self.alive() and SERVED.encode() in get(self.frontend + "/v1/models")[1],
            deadline_s,
        )
        for port in self.more_frontends:
            wait(
                "model listed by the other frontend",
                lambda p=port: SERVED.encode() in get(f"http://127.0.0.1:{p}/v1/models")[1],
                deadline_s,
            )  # type: ignore[misc]
        if self.with_router:
            wait("router ready", self.router_ready, deadline_s)
        if self.with_gateway:
            wait("gateway healthy", lambda: get(self.gateway + "/health")[0] == 200, deadline_s)

    def alive(self) -> bool:
        """True; RuntimeError with the log's end when a process has ended on its own."""
        for name, process in self.processes.items():
            if process.poll() not in (None, -signal.SIGKILL, -signal.SIGTERM):
                raise RuntimeError(
                    f"{name} ended with {process.returncode}: {(self.dir / (name + '.log')).read_text()[-1500:]}"
                )
        return True

    def router_status(self) -> dict[str, Any]:
        status, body = get(f"http://127.0.0.1:{self.router_http}/status")
        return dict(json.loads(body)) if status == 200 else {}

    def router_ready(self, workers: int = 0) -> bool:
        status = self.router_status()
        pool = status.get("pools", {}).get("prefill")
        return bool(status.get("ready")) and (
            pool is None or len(pool["workers"]) >= (workers or self.replicas["prefill"])
        )

    def worker_metric(self, name: str, metric: str) -> float:
        """A counter of one mock worker, from its own system port. A worker that is slow to tell is asked again: "no
        answer" is not 0."""

        def read() -> list[float]:
            body = get(f"http://127.0.0.1:{self.system_ports[name]}/metrics")[1].decode()
            lines = (x for x in body.splitlines() if x.startswith(metric) and x[len(metric)] in " {")
            return [float(x.rsplit(" ", 1)[1]) for x in lines]

        return float(sum(wait(f"{metric} of {name}", read, 30)))

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + 8
        for process in self.processes.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(5)
        shutil.rmtree(self.dir / "discovery", ignore_errors=True)
