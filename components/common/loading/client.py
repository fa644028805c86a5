"""HTTP/JSON client of the weight service (see components.common.messages.weights), over a Unix socket or TCP."""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.messages.weights import Release, Sources

_POLL_S = 0.05
_LIMIT = 256 << 20  # a manifest has 70 bytes per range, sources some 200


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


class _Until(io.RawIOBase):
    """What comes from a socket until a point in time (time.monotonic()); TimeoutError then."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer did not end in time")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)


class ServiceGone(Exception):
    """The weight service does not answer (it is not there, died, or is late)."""


class ServiceClient:
    """One request per call, each with a deadline; raises ServiceGone or the service's own DynamoBlobError."""

    def __init__(self, address: str, timeout_s: float = 5.0) -> None:
        self.address, self.timeout_s = address, timeout_s

    def get(self, path: str, timeout_s: float | None = None, limit: int = _LIMIT) -> bytes:
        """The body. ServiceGone when it has more than `limit` bytes, or did not end in time: one that sends a byte now
        and then holds nobody up. (A name with several addresses may cost the time once for each to connect.)"""
        timeout = timeout_s or self.timeout_s
        try:
            connection = connect(self.address, timeout)
            end = time.monotonic() + timeout
            try:
                connection.request("GET", path)
                sock: Any = _Until(connection.sock, end)
                answer = http.client.HTTPResponse(sock, method="GET")
                answer.begin()
                body = answer.read(limit + 1)
                if len(body) > limit:
                    raise http.client.HTTPException(f"more than {limit} bytes")
                if answer.length:
                    raise http.client.IncompleteRead(body, answer.length)
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
