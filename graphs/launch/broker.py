"""The event broker: ``python -m graphs.launch.broker --plan FILE``. Relays Dynamo's KV and load events over loopback.

Dynamo's ZMQ event plane lets every publisher bind a port on every interface and only advertises another
address. In broker mode publishers and subscribers connect to one XSUB/XPUB pair instead, which we bind
where we want. If it dies, requests go on; routers learn nothing new until it is back (they reconnect).
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from typing import Any

from pydantic import Field

from components.common.config import Config
from components.common.errors import DynamoBlobError

HIGH_WATER = 100_000
"""Messages kept for a subscriber that lags; beyond it the oldest are dropped (routers ask workers for what they missed)."""


class BrokerConfig(Config):
    name: str = Field("events-0", description="process name")
    publishers: str = Field(description="tcp://host:port that publishers connect to (XSUB)")
    subscribers: str = Field(description="tcp://host:port that subscribers connect to (XPUB)")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m graphs.launch.broker")
    parser.add_argument("--plan", required=True, help="JSON file of BrokerConfig")
    try:
        serve(BrokerConfig.read(parser.parse_args(argv).plan))
    except DynamoBlobError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


def serve(config: BrokerConfig) -> None:
    """Until SIGTERM. Raises EVENTS-PORT when an address cannot be bound."""
    import zmq

    context: Any = zmq.Context.instance()
    xsub, xpub, control, stop = (context.socket(kind) for kind in (zmq.XSUB, zmq.XPUB, zmq.PAIR, zmq.PAIR))
    for socket in (xsub, xpub):
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    for socket, address in ((xsub, config.publishers), (xpub, config.subscribers)):
        try:
            socket.bind(address)
        except zmq.ZMQError as e:
            raise DynamoBlobError(
                "EVENTS-PORT", "the event broker cannot listen", where=address, why=str(e), do="move network.base_port"
            ) from None
    control.bind("inproc://control")
    stop.connect("inproc://control")
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: stop.send(b"TERMINATE"))
    relay = threading.Thread(target=zmq.proxy_steerable, args=(xsub, xpub, None, control), name="relay")
    relay.start()
    while relay.is_alive():  # the main thread stays free for signals
        relay.join(0.2)
    context.destroy(linger=0)


if __name__ == "__main__":
    sys.exit(main())
