"""Is a replica of Dynamo's frontend frozen? Its socket takes connections as long as the kernel lives, and a request may
rightly be silent for minutes; so a small question is asked whenever nothing was heard for a while, and no answer to it
within `frozen_after_s`, nor a byte on any other connection, means that nobody is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from components.frontend.upstream import Replica, Upstreams

log = logging.getLogger("gateway")

QUIET_S = 2.0
"""Seconds without a byte from a replica after which it is asked."""


class Pulse:
    """Sets `Replica.frozen`: requests under way there fail, new ones go elsewhere or are refused at once."""

    def __init__(self, upstreams: Upstreams, frozen_after_s: float) -> None:
        self.upstreams, self.frozen_after_s = upstreams, frozen_after_s
        self._tasks: Sequence[asyncio.Task[None]] = ()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch(r)) for r in self.upstreams.replicas]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        while True:
            quiet = loop.time() - replica.heard_at
            if not replica.frozen and quiet < QUIET_S:
                await asyncio.sleep(QUIET_S - quiet)
                continue
            asked = loop.time()
            if await self._answers(replica) or await self._answers(
                replica
            ):  # twice: we may have been stopped ourselves
                replica.frozen = False
                await asyncio.sleep(QUIET_S)
            elif replica.heard_at < asked and not replica.frozen:
                log.warning("%s does not answer: frozen", replica.base)
                replica.freeze(f"{replica.base} has not answered for {self.frozen_after_s:g} s")

    async def _answers(self, replica: Replica) -> bool:
        try:
            async with asyncio.timeout(self.frozen_after_s / 2):
                await self.upstreams.ask_alive(replica)
        except TimeoutError:
            return False
        except OSError:  # gone, not frozen: connecting says so by itself
            return True
        return True
