"""Runs engines in a driver process from a synchronous test."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from components.common.kv.shm import sweep

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".state" / "models"
LOCK = Path(tempfile.gettempdir()) / "dynamo-blob.engines.lock"


class EngineError(RuntimeError):
    """The driver's error, with the end of its log: vLLM tells its parent only "Engine core initialization failed"."""


class Driver:
    """`with Driver(tmp_path) as d:` holds the machine-wide lock on engines for as long as it lives."""

    def __init__(self, work: Path, env: dict[str, str] | None = None) -> None:
        self.log = work / "driver.log"
        self._sockets = tempfile.TemporaryDirectory(prefix="db-zmq-")
        self._env = {
            **os.environ, **(env or {}), "PYTHONPATH": str(ROOT), "VLLM_RPC_BASE_PATH": self._sockets.name,
        }  # fmt: skip
        self._n = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = None

    def __enter__(self) -> Driver:
        if not os.environ.get("DYNAMO_BLOB_ENGINES_LOCKED"):
            self._lock = open(LOCK, "a")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        ready: Future[Any] = Future()
        self._waiting[0] = ready
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kvtools.driver"], cwd=ROOT, env=self._env,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        ready.result(180)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        sweep(5.0)
        self._sockets.cleanup()
        if self._lock is not None:
            self._lock.close()
        assert b"BufferError" not in self.log.read_bytes(), f"an engine ended with views of DRAM left: {self.log}"

    def _read(self) -> None:
        for line in self.process.stdout:
            answer = json.loads(line)
            future = self._waiting.pop(answer["n"])
            if "error" in answer:
                future.set_exception(EngineError(f"{answer['error']}\n{self.tail()}"))
            else:
                future.set_result(answer["ok"])
        for future in self._waiting.values():
            future.set_exception(EngineError(f"the driver ended\n{self.tail()}"))

    def tail(self, nbytes: int = 6000) -> str:
        return self.log.read_bytes()[-nbytes:].decode(errors="replace")

    def send(self, do: str, **ask: Any) -> Future[Any]:
        n = next(self._n)
        future: Future[Any] = Future()
        self._waiting[n] = future
        self.process.stdin.write(json.dumps({"n": n, "do": do, **ask}).encode() + b"\n")
        self.process.stdin.flush()
        return future

    def call(self, do: str, timeout: float = 180.0, **ask: Any) -> Any:
        return self.send(do, **ask).result(timeout)

    def cpu_s(self) -> float:
        """CPU seconds of the driver and all of its engines' processes so far, as the kernel counts them."""
        driver = psutil.Process(self.process.pid)
        return float(sum(sum(p.cpu_times()[:2]) for p in [driver, *driver.children(recursive=True)]))

    def engine(
        self, name: str, model: str | Path, timeout: float = 180.0, env: dict[str, str] | None = None, **args: Any
    ) -> Engine:
        path = MODELS / model if isinstance(model, str) else model
        info = self.call("start", timeout, name=name, args={"model": str(path), **args}, env=env)
        return Engine(self, name, info)


class Engine:
    def __init__(self, driver: Driver, name: str, info: dict[str, Any]) -> None:
        self.driver, self.name, self.info = driver, name, info

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def generate(self, ids: list[int], timeout: float = 180.0, **ask: Any) -> dict[str, Any]:
        return self.driver.call("generate", timeout, name=self.name, ids=ids, **ask)

    def begin(self, ids: list[int], **ask: Any) -> Future[Any]:
        return self.driver.send("generate", name=self.name, ids=ids, **ask)

    def forget(self, dram: bool = False) -> None:
        """Empty HBM, and DRAM with `dram`."""
        assert self.driver.call("reset", name=self.name, dram=dram), "the prefix cache could not be reset"

    def metrics(self, prefix: str = "vllm:") -> dict[str, float]:
        return self.driver.call("metrics", prefix=prefix)

    def sources(self) -> dict[str, float]:
        """Prompt tokens by where their KV came from."""
        found = self.metrics("vllm:prompt_tokens_by_source")
        return {k.split("source=")[1].rstrip("}"): v for k, v in found.items() if "source=" in k}

    def stop(self) -> None:
        self.driver.call("stop", name=self.name)


def shm_leftovers() -> set[str]:
    return set(glob.glob("/dev/shm/vllm_offload_*")) | set(glob.glob("/dev/shm/psm_*"))
