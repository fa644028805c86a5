"""What a sweeper answers over HTTP: /health, /live, /metrics. Standard library only; reads a copy, blocks no sweep."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PREFIX = "dynamo_blob_sweeper_"
_GAUGES = {
    "objects": "objects the catalogue holds",
    "bytes": "bytes the catalogue holds",
    "tenants_file_bad": "1 while the tenants file on disk is broken and the last good one rules",
    "leading": "1 while this sweeper holds the lease",
    "sweep_seconds": "seconds the last sweep took",
    "generations_unknown": "1 while the purge generations cannot be known: purged objects are not swept, workers use no Blob tier",
    "clock_skew_seconds": "seconds the store's clock is ahead of this machine's",
}


class State:
    """What the sweeper last did. Written by its thread, read by the server's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._why = "no turn has ended yet"
        self._but = ""
        self.turn_at = time.monotonic()

    def turn(self, why: str, values: Mapping[str, float], problems: Mapping[str, str] | None = None) -> None:
        """A turn has ended: `why` it failed ("" = it did not), the counters as they are now, and what did not work
        while the rest went on."""
        with self._lock:
            self._why, self._values, self.turn_at = why, dict(values), time.monotonic()
            self._but = "".join(f"; {what}: {text}" for what, text in sorted((problems or {}).items()))

    def health(self) -> tuple[int, str]:
        """(200, role) when the last turn reached the store, else (503, why)."""
        with self._lock:
            if self._why:
                return 503, self._why
            role = "sweeping" if self._values.get("leading") else "standing by: another sweeper holds the lease"
            return 200, role + self._but

    def metrics(self) -> str:
        with self._lock:
            values = sorted(self._values.items())
        out = []
        for key, value in values:
            gauge = key in _GAUGES
            name = _PREFIX + key + ("" if gauge else "_total")
            out.append(f"# HELP {name} {_GAUGES.get(key, key.replace('_', ' '))}")
            out.append(f"# TYPE {name} {'gauge' if gauge else 'counter'}")
            out.append(f"{name} {value:.10g}")
        return "\n".join(out) + "\n"


class Ops:
    """The server; `listen` is host:port. Raises OSError when the port is taken."""

    def __init__(self, listen: str, state: State) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                if self.path == "/health":
                    code, text = state.health()
                elif self.path == "/live":
                    code, text = 200, "alive"
                elif self.path == "/metrics":
                    code, text = 200, state.metrics()
                else:
                    code, text = 404, "no such path"
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        host, _, port = listen.rpartition(":")
        self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="ops", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)
