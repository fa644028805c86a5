"""Connections to one host by name, when the name service is slow or away.

`socket.create_connection` looks the name up without any deadline (a resolver may take half a minute). Here a look-up has
one, its answer serves for a while, and when no new one comes the last known addresses are tried: over https the
certificate says whether it is still that host, and over plain http nothing ever did.
"""

from __future__ import annotations

import socket
import threading
import time

_FRESH_S = 30.0
_AWAY_S = 5.0  # a name service that did not answer is not asked again for so long, where addresses are known
_PATIENCE_S = 2.0  # for a new answer, where addresses are known

Address = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]


class Name:
    """Thread-safe. `lookups` counts questions to the name service, `stale` connections by addresses it no longer confirmed."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.lookups = self.stale = 0
        self._lock = threading.Lock()
        self._known: list[Address] = []
        self._until = 0.0

    def connect(self, timeout_s: float) -> socket.socket:
        """A connected socket, within `timeout_s`. Raises OSError (socket.gaierror if there is no address)."""
        end = time.monotonic() + timeout_s
        error: OSError | None = None
        for family, address in self._addresses(timeout_s):
            left = end - time.monotonic()
            if left <= 0:
                break
            s = socket.socket(family, socket.SOCK_STREAM)
            try:
                s.settimeout(left)
                s.connect(address)
                return s
            except OSError as e:
                s.close()
                error = e
        with self._lock:
            self._until = min(self._until, time.monotonic())  # where nobody answers, ask again where it is
        raise error or TimeoutError(f"no connection within {timeout_s:g} s")

    def _addresses(self, timeout_s: float) -> list[Address]:
        with self._lock:
            known, fresh = self._known, time.monotonic() < self._until
        if known and fresh:
            return known
        answer = self._ask(min(timeout_s / 2, _PATIENCE_S) if known else timeout_s)
        if isinstance(answer, list):
            with self._lock:
                self._known, self._until = answer, time.monotonic() + _FRESH_S
            return answer
        if not known:
            raise answer
        with self._lock:
            self._until = time.monotonic() + _AWAY_S
            self.stale += 1
        return known

    def _ask(self, timeout_s: float) -> list[Address] | OSError:
        """In a thread of its own: the look-up itself cannot be given up."""
        answers: list[list[Address] | OSError] = []
        there = threading.Event()

        def look() -> None:
            try:
                found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
                answers.append([(family, address) for family, _, _, _, address in found])
            except OSError as e:
                answers.append(e)
            except UnicodeError as e:  # no host name at all
                answers.append(socket.gaierror(socket.EAI_NONAME, str(e)))
            there.set()

        self.lookups += 1
        threading.Thread(target=look, name=f"look-up {self.host}", daemon=True).start()
        there.wait(timeout_s)
        return answers[0] if answers else socket.gaierror(socket.EAI_AGAIN, f"no answer within {timeout_s:g} s")
