"""The router process: ``python -m router --plan FILE`` (a RouterConfig). Exit codes: 0 stopped, 1 failed, 2 bad plan."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from typing import Any

import uvloop
from aiohttp import web

from components.common.errors import DynamoBlobError
from components.common.messages.announce import Heard
from router.config import RouterConfig
from router.decide import Decider
from router.pool import Pool
from router.server import LineServer, http_app

log = logging.getLogger("router")

SWEEP_S = 2.0


async def serve(config: RouterConfig) -> None:
    """Answers from the first moment; until the pools' indexes are there the answer is "no advice"."""
    from dynamo.runtime import DistributedRuntime

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)
    runtime = DistributedRuntime(loop, config.discovery, config.request_plane, event_plane=config.event_plane)
    prefill = Pool(config, runtime, config.prefill_component) if config.prefill_component else None
    decode = Pool(config, runtime, config.decode_component)
    decider = Decider(config, prefill)
    opening = [asyncio.create_task(p.keep_open()) for p in (prefill, decode) if p]

    def status() -> dict[str, Any]:
        pools = {
            p.component: {"workers": p.workers(), "indexed": p.index is not None, "error": p.error}
            for p in (prefill, decode)
            if p
        }
        return {
            "name": config.name, "pid": os.getpid(), "ready": all(p["indexed"] for p in pools.values()),
            "pools": pools, "bookings": len(decider.bookings), "announced": heard.status(),
        }  # fmt: skip

    async def audit() -> dict[str, Any]:
        """The prefill pool only: decode workers answer no dump."""
        return {prefill.component: {str(w): n for w, n in (await prefill.held()).items()}} if prefill else {}

    heard = Heard(config.announce, config.name)
    lines = LineServer(decider)
    runner: web.AppRunner | None = None
    if config.http or not config.listen.startswith("unix:"):
        runner = web.AppRunner(http_app(decider, status, audit), access_log=None)
        await runner.setup()
        for address in dict.fromkeys(a for a in (config.http, config.listen) if a and not a.startswith("unix:")):
            host, _, port = address.removeprefix("tcp:").rpartition(":")
            await web.TCPSite(runner, host or "127.0.0.1", int(port)).start()
    server = await lines.start(config.listen.removeprefix("unix:")) if config.listen.startswith("unix:") else None
    log.info("%s decides on %s", config.name, config.listen)
    try:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), SWEEP_S)
            decider.sweep()
    finally:
        heard.close()
        for task in opening:
            task.cancel()
        if server is not None:
            server.close()
            await lines.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.listen.removeprefix("unix:"))
        if runner is not None:
            await runner.cleanup()
        runtime.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--plan", required=True, help="JSON of a RouterConfig")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = RouterConfig.read(args.plan)
    except DynamoBlobError as e:
        print(e, file=sys.stderr)
        return 2
    try:
        uvloop.run(serve(config))
    except (DynamoBlobError, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Dynamo's runtime threads would delay a normal exit by seconds
