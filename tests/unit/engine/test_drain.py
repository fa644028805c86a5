"""A draining worker waits for answers in flight, and lets go of the rest at its deadline."""

import asyncio
import time

from components.common.engine.drain import InFlight


async def test_an_idle_worker_drains_at_once():
    began = time.monotonic()
    assert await InFlight().drain(10, abort=None) == 0
    assert time.monotonic() - began < 1


async def test_answers_in_flight_finish():
    flights, aborted = InFlight(), []

    async def answer():
        with flights.track("a"):
            await asyncio.sleep(0.1)

    task = asyncio.create_task(answer())
    await asyncio.sleep(0)
    assert await flights.drain(5, abort=aborted.append) == 0
    assert task.done() and not aborted and not flights.draining


async def test_what_outlasts_the_deadline_is_aborted_and_knows_why():
    flights, ended = InFlight(), asyncio.Event()

    async def answer():
        with flights.track("slow"):
            await ended.wait()

    task = asyncio.create_task(answer())
    await asyncio.sleep(0)
    seen = []

    async def abort(request_id):
        seen.append((request_id, flights.draining))
        ended.set()

    assert await flights.drain(0.05, abort) == 1
    await task
    assert seen == [("slow", True)], "draining is set before the abort, so that the answer ends as a migration"
    assert len(flights) == 0
