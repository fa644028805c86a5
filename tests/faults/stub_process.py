"""A stand-in for a component: answers /health, obeys SIGTERM, may start a helper or hold shared memory. Standard library only.

python -S stub_process.py PORT [--ready-after S] [--ready-when FILE] [--helper] [--shm NAME] [--exit CODE] [--drain S] [--stubborn]
"""

from __future__ import annotations

import argparse
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any


def serve(args: argparse.Namespace) -> None:
    began, draining = time.monotonic(), threading.Event()
    print(f"stub on {args.port}", flush=True)
    if args.shm:
        handle = open(f"/dev/shm/{args.shm}", "wb")  # noqa: SIM115 - kept open as shared memory is
        handle.write(b"x")
        handle.flush()
    if args.helper:  # as vLLM: a process of the same session that ignores SIGTERM
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-S", "-c", code])
    if args.exit is not None:
        print("STUB-REFUSED: this stub was told to refuse\n  why: --exit", flush=True)
        sys.exit(args.exit)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = time.monotonic() - began >= args.ready_after
            ready = ready and (not args.ready_when or os.path.exists(args.ready_when))
            self.send_response(200 if ready else 503)
            self.end_headers()
            self.wfile.write(b"{}" if ready else b'{"why": "still loading"}')

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler)

    def term(*_: Any) -> None:
        if not args.stubborn:
            draining.set()
            threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, term)
    server.serve_forever(poll_interval=0.02)
    time.sleep(args.drain)  # answers in flight
    print("drained", flush=True)
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--ready-after", type=float, default=0.0)
    parser.add_argument("--ready-when", default="", help="a file that must exist")
    parser.add_argument("--helper", action="store_true")
    parser.add_argument("--shm", default="")
    parser.add_argument("--exit", type=int)
    parser.add_argument("--drain", type=float, default=0.0)
    parser.add_argument("--stubborn", action="store_true")
    serve(parser.parse_args())
