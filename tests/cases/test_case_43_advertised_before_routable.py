"""Case 43 (dynamo#11855, #3493): a model was advertised before it could be routed to; a lost lease never came back."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.mockgraph import Served, until

pytestmark = pytest.mark.slow


def get(port: int, path: str) -> tuple[int, bytes]:
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=35)
    try:
        c.request("GET", path)
        answer = c.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        c.close()


def listed(port: int) -> bool:
    status, body = get(port, "/v1/models")
    return status == 200 and bool(json.loads(body)["data"])


def test_case_43_listed_means_routable_and_a_lost_lease_comes_back(tmp_path: Path) -> None:
    served = Served("mock", tmp_path / "state")
    try:
        served.log.flush()
        end = time.monotonic() + 180
        while not listed(served.port):
            assert served.process.poll() is None and time.monotonic() < end, "the graph did not start"
            time.sleep(0.05)
        served.run_dir = next(iter((tmp_path / "state" / "runs").iterdir()))
        assert served.chat("the first request after the model was listed")[0] == 200
        served.wait_ready()
        pid = served.row("decode-0")["pid"]
        os.kill(pid, signal.SIGSTOP)  # its lease runs out while it cannot renew it (file discovery: 10 s)
        try:
            until(lambda: not listed(served.port), 60, "the model of the frozen worker is not listed any more")
            assert served.row("decode-0")["state"] in ("ready", "unready")
            until(lambda: served.row("decode-0")["state"] == "unready", 30, "the table says that it does not answer")
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: listed(served.port), 90, "the model is listed again")
        until(lambda: served.chat("after the lease came back")[0] == 200, 60, "an answer")
        assert served.row("decode-0")["restarts"] == 1, (
            "Dynamo registers no worker again whose lease ran out: the launcher restarts it"
        )
    finally:
        served.stop()
