"""Weight services as real processes, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from components.common.loading.client import ServiceClient
from components.common.loading.config import WeightsConfig
from components.weights.config import WeightServiceConfig
from components.weights.server import serve
from components.weights.service import WeightService

REPOSITORY = Path(__file__).resolve().parents[2]


class ServiceThread:
    """A weight service inside this process, for everything but kill -9: starts in milliseconds."""

    def __init__(self, work: Path, weights: WeightsConfig, name: str = "weights-0", **config: Any) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.socket = f"unix:{work}/{name}.sock"
        self.config = WeightServiceConfig(
            name=name, listen=config.pop("listen", self.socket), weights=weights, **config
        )
        self.service = WeightService(self.config)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(serve(self.service, self._stop))
        except BaseException as e:
            self.error = e

    def start(self, wait_s: float = 30.0) -> ServiceThread:
        self._thread.start()
        self.client.wait_ready(time.monotonic() + wait_s, stopped=lambda: self.error is not None)
        assert self.error is None, self.error
        return self

    @property
    def client(self) -> ServiceClient:
        return ServiceClient(self.config.listen)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.client.get("/v1/status")))

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._loop.close()

    def __enter__(self) -> ServiceThread:
        return self.start() if self._thread.ident is None else self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.stop()


class ServiceProcess:
    """`python -m components.weights --plan FILE`; `log` holds its output."""

    def __init__(self, work: Path, weights: WeightsConfig, name: str = "weights-0", **config: Any) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.socket = f"unix:{work}/{name}.sock"
        self.config = WeightServiceConfig(
            name=name, listen=config.pop("listen", self.socket), weights=weights, **config
        )
        self.plan = work / f"{name}.json"
        self.plan.write_text(self.config.model_dump_json())
        self.log = work / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, wait_s: float = 30.0) -> ServiceProcess:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "components.weights", "--plan", str(self.plan)], cwd=REPOSITORY, stdout=log, stderr=log,
                start_new_session=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            )  # fmt: skip
        if wait_s:
            self.client.wait_ready(
                time.monotonic() + wait_s, stopped=lambda: self.process is None or self.process.poll() is not None
            )
            assert self.process.poll() is None, self.log.read_text()
        return self

    @property
    def client(self) -> ServiceClient:
        return ServiceClient(self.config.listen)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.client.get("/v1/status")))

    def kill(self, how: int = signal.SIGKILL) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(20)

    def stop(self) -> int:
        return self.kill(signal.SIGTERM)

    def __enter__(self) -> ServiceProcess:
        return self.start() if self.process is None else self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
