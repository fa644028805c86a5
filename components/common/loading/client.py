"""HTTP/JSON client of the weight service (see components.common.messages.weights), over a Unix socket or TCP."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.messages.weights import Release, Sources

_POLL_S = 0.05


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def connect(address: str, timeout: float) -> http.client.HTTPConnection:
    """A connection to ``unix:/path`` or ``host:port`` (``tcp:host:port`` too); `timeout` seconds per socket operation."""
    if address.startswith("unix:"):
        return _Unix(address[5:], timeout)
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=timeout)


class ServiceGone(Exception):
    """The weight service does not answer (it is not there, died, or is late)."""


class ServiceClient:
    """One request per call, each with a deadline; raises ServiceGone or the service's own DynamoBlobError."""

    def __init__(self, address: str, timeout_s: float = 5.0) -> None:
        self.address, self.timeout_s = address, timeout_s

    def get(self, path: str, timeout_s: float | None = None) -> bytes:
        try:
            connection = connect(self.address, timeout_s or self.timeout_s)
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                body = answer.read()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as e:
            raise ServiceGone(f"{self.address}: {type(e).__name__}: {e}") from None
        if answer.status != 200:
            raise service_error(answer.status, body, self.address + path)
        return body

    def wait_ready(self, deadline: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Return when the service has resolved and verified its release.

        Raises ServiceGone at `deadline` (time.monotonic()), or at once the service's own error if it is final.
        """
        last = "never answered"
        while not stopped():
            try:
                self.get("/health", min(self.timeout_s, max(0.1, deadline - time.monotonic())))
                return
            except ServiceGone as e:
                last = str(e)
            except DynamoBlobError as e:
                if e.data.get("final"):
                    raise
                last = str(e)
            if time.monotonic() + _POLL_S >= deadline:
                break
            time.sleep(_POLL_S)
        raise ServiceGone(last)

    def release(self) -> Release:
        return Release.parse(json.loads(self.get("/v1/release")), where=self.address)

    def manifest(self) -> bytes:
        return self.get("/v1/manifest")

    def sources(self, object_digest: str) -> Sources:
        return Sources.parse(json.loads(self.get(f"/v1/sources?object={object_digest}")), where=self.address)


def service_error(status: int, body: bytes, where: str) -> DynamoBlobError:
    """The error in an answer of the service; WEIGHTS-SERVICE when its body is none of ours."""
    try:
        found: dict[str, Any] = json.loads(body)
        known = {k: str(found.pop(k, "")) for k in ("where", "why", "do")}
        return DynamoBlobError(str(found.pop("code")), str(found.pop("what")), **known, **found)
    except (ValueError, KeyError, TypeError, AttributeError):
        return DynamoBlobError(
            "WEIGHTS-SERVICE",
            f"the weight service answered {status}",
            where=where,
            why=body[:200].decode("utf-8", "replace"),
        )
