"""What `on_outage` does to whole worker processes: started as `dynamo serve` starts them, the store gone or coming back.

The engine is the fake one: what is at stake is whether a worker becomes ready, waits, or refuses. Real weights under
`use_cache` are loaded in test_p2_outage.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.standin import StandIn
from components.common.engine.config import EngineArgs, WorkerConfig
from components.common.loading.files import materialise_small_files
from tests.faults.releases import MiB, make_release, weights_config
from tests.faults.services import REPOSITORY, ServiceThread
from tools.tiny_model import build


def system_port() -> int:
    """A free port that Dynamo takes for DYN_SYSTEM_PORT: it reads a signed 16-bit number."""
    for port in range(26400, 26500):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            if port not in _taken:
                _taken.add(port)
                return port
    raise AssertionError("no free port")


_taken: set[int] = set()


class Place:
    def __init__(self, root: Path) -> None:
        self.root = root
        model = REPOSITORY / ".state/models/tiny-full"  # the fake engine answers in words of a real tokenizer
        build("full", model, model.parent / "smollm2-135m-instruct")
        self.manifest = make_release(root / "store", model)
        self.store = StandIn(root / "store").start()
        self.port = self.store.port
        self.workers: list[Worker] = []

    def restore(self) -> None:
        self.store = StandIn(self.root / "store", self.port).start()

    def config(self, name: str, on_outage: str, **changes: object):  # type: ignore[no-untyped-def]
        base = weights_config(
            f"http://127.0.0.1:{self.port}/standin", self.root / name, self.manifest, range_retries=0, on_outage=on_outage,
            service_deadline_s=0.3, **{"cache_dir": str(self.root / "cache"), **changes},
        )  # fmt: skip
        return base.model_copy(update={"account": base.account.model_copy(update={"retries": 0})})

    def worker(self, name: str, on_outage: str, **changes: object) -> Worker:
        w = Worker(self.root / name, self.config(name, on_outage, **changes))
        self.workers.append(w)
        return w


class Worker:
    def __init__(self, root: Path, weights) -> None:  # type: ignore[no-untyped-def]
        root.mkdir(parents=True, exist_ok=True)
        self.port = system_port()
        config = WorkerConfig(
            name="aggregated-0", role="aggregated", served_model="m", namespace="outage", component="backend", run_dir=str(root / "run"),
            weights=weights, engine=EngineArgs(), engine_kind="mock",
        )  # fmt: skip
        (root / "plan.json").write_text(config.model_dump_json())
        self.log = root / "log"
        env = {
            **{k: os.environ[k] for k in ("PATH", "HOME") if k in os.environ}, "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(root / "discovery"),
            "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": str(self.port),
            "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        }  # fmt: skip
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "components.decode", "--plan", str(root / "plan.json")], cwd=REPOSITORY, env=env,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as r:
                return bool(r.status == 200)
        except (OSError, urllib.error.HTTPError):
            return False

    def until_healthy(self) -> None:
        end = time.monotonic() + 90
        while not self.healthy():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-2000:]
            time.sleep(0.1)

    def refused(self) -> str:
        assert self.process.wait(90) == 1, self.log.read_text()[-2000:]
        said = self.log.read_text()
        assert "Traceback" not in said
        return said[said.index("WEIGHTS-OUTAGE") :]

    def until_says(self, text: str) -> None:
        end = time.monotonic() + 60
        while text not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-2000:]
            time.sleep(0.1)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    p = Place(tmp_path)
    yield p
    for w in p.workers:
        if w.process.poll() is None:
            w.process.kill()
            w.process.wait()
    p.store.close()


def test_fail_refuses_at_once_and_wait_comes_up_with_the_store(place: Place) -> None:
    place.store.close()
    waiting, failing = place.worker("waits", "wait", deadline_s=120.0), place.worker("fails", "fail")
    assert "wait would wait" in failing.refused()
    assert waiting.process.poll() is None and not waiting.healthy()
    place.restore()
    waiting.until_healthy()


def test_keep_warm_replicas_keeps_what_runs_and_starts_nothing(place: Place) -> None:
    warm = place.worker("warm", "keep_warm_replicas")
    warm.until_healthy()
    place.store.close()
    assert "keep serving" in place.worker("late", "keep_warm_replicas").refused()
    assert warm.healthy() and warm.process.poll() is None


def test_use_cache_starts_from_the_node_alone_and_refuses_without(place: Place) -> None:
    filled = place.config("cached", "use_cache")
    with ServiceThread(place.root / "s", filled, cache_dir=str(place.root / "cache"), cache_bytes=64 * MiB):
        materialise_small_files(filled)
    place.store.close()
    place.worker("cached", "use_cache").until_healthy()
    said = place.worker("bare", "use_cache", cache_dir=str(place.root / "nothing")).refused()
    assert "node cache" in said
