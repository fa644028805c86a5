"""Start the weight service: ``python -m components.weights --plan FILE``.

Exit codes: 0 stopped by SIGTERM or SIGINT; 1 the release was refused or the service cannot start (one coded error on stderr).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys

from components.common.errors import DynamoBlobError
from components.weights.config import WeightServiceConfig


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m components.weights")
    parser.add_argument("--plan", required=True, help="JSON file with this service's configuration")
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("azure").setLevel(logging.WARNING)
    try:
        asyncio.run(_run(WeightServiceConfig.read(args.plan)))
        return 0
    except DynamoBlobError as e:
        print(e, file=sys.stderr, flush=True)
    except OSError as e:
        print(
            DynamoBlobError("WEIGHTS-START-FAILED", "the weight service cannot start", why=str(e)),
            file=sys.stderr,
            flush=True,
        )
    return 1


async def _run(config: WeightServiceConfig) -> None:
    from components.weights.server import serve
    from components.weights.service import WeightService

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(WeightService(config), stop)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # NIXL's end waits for transfers of dead peers; everything of ours is put away by now
