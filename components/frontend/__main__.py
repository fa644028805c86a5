"""The gateway process: ``python -m components.frontend --plan FILE`` (a GatewayConfig). Exit codes: 0 stopped, 1 failed, 2 bad plan."""

from __future__ import annotations

import argparse
import logging
import sys

import uvloop

from components.common.errors import DynamoBlobError
from components.frontend.app import serve
from components.frontend.config import GatewayConfig


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m components.frontend", description=__doc__)
    parser.add_argument("--plan", required=True, help="JSON of a GatewayConfig")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = GatewayConfig.read(args.plan)
    except DynamoBlobError as e:
        print(e, file=sys.stderr)
        return 2
    try:
        if config.weights is not None:
            from components.common.loading.files import materialise_small_files

            config = config.model_copy(update={"model_path": str(materialise_small_files(config.weights))})
        uvloop.run(serve(config))
    except (DynamoBlobError, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
