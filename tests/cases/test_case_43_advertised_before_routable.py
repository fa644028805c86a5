"""Case 43 (dynamo#11855, #3493): a model was advertised before it could be routed to; a lost lease never came back."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def listed(port: int) -> bool | None:
    """Whether clients are told of the model; None = no answer, which says neither."""
    status, body = get(port, "/v1/models")
    return None if status == 0 else status == 200 and bool(json.loads(body)["data"])


class Decode:
    """What the table said of the worker while the test looked elsewhere: on a slow machine it may be killed and back by then."""

    def __init__(self, served: Served) -> None:
        self.served, self.states = served, set[str]()

    def row(self) -> dict[str, Any]:
        row = self.served.row("decode-0")
        self.states.add(row["state"])
        return row

    def found(self) -> bool:
        """The launcher has seen that it does not answer (30 s of silence: it was killed for it)."""
        row = self.row()
        return row["state"] != "ready" or row["restarts"] >= 1

    def gone(self) -> bool:
        """Not listed, twice in a row: one look may fall into a time-out of a busy gateway."""
        self.row()
        return [listed(self.served.port) for _ in range(2)] == [False, False]


def test_case_43_listed_means_routable_and_a_lost_lease_comes_back(tmp_path: Path) -> None:
    served = Served("mock", tmp_path / "state")
    try:
        end = time.monotonic() + 180
        while not listed(served.port):
            assert served.process.poll() is None and time.monotonic() < end, "the graph did not start"
            time.sleep(0.05)
        served.run_dir = next(iter((tmp_path / "state" / "runs").iterdir()))
        assert served.chat("the first request after the model was listed")[0] == 200
        served.wait_ready()
        decode = Decode(served)
        row = decode.row()
        assert (row["state"], row["restarts"]) == ("ready", 0)
        os.kill(row["pid"], signal.SIGSTOP)  # its lease runs out while it cannot renew it (file discovery: 10 s)
        try:
            until(decode.gone, 60, "the model of the frozen worker is not listed any more")
            until(decode.found, 30, "the table says that it does not answer")
        finally:
            with suppress(ProcessLookupError):  # killed by then: FROZEN_S of the launcher
                os.kill(row["pid"], signal.SIGCONT)
        until(lambda: listed(served.port) is True, 90, "the model is listed again")
        until(lambda: served.chat("after the lease came back")[0] == 200, 60, "an answer")
        again = decode.row()
        assert again["restarts"] >= 1 and again["pid"] != row["pid"], (
            "Dynamo registers no worker again whose lease ran out: the launcher restarts it"
        )
    finally:
        served.stop()
