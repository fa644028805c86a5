"""A launcher of stub processes: what the launcher's fault tests run and kill.

python -m tests.faults.launcher_stub STATE PLAN.json [SESSIONS]

Prints "READY run-directory" when a graph is ready, "CLOSED open-descriptors" after its end; SESSIONS graphs one after
the other (1).
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from graphs.launch.session import Session
from graphs.launch.table import View
from graphs.plan import Plan, Port, Probe, Process


def stub(
    name: str,
    port: int,
    run_dir: Path,
    *options: str,
    after: tuple[str, ...] = (),
    component: str = "router",
    **fields: Any,
) -> Process:
    component = fields.pop("kind", component)
    argv = (sys.executable, "-S", str(Path(__file__).with_name("stub_process.py")), str(port), *options)
    return Process(
        name=name, component=component, argv=argv, env={"DYNAMO_BLOB_RUN": str(run_dir)}, cwd=str(run_dir / "cwd" / name),
        ports=(Port(name="http", number=port),), probe=Probe(http=f"http://127.0.0.1:{port}/health", deadline_s=20), after=after,
        **{"drain_s": 1.0, "grace_s": 5.0, **fields},
    )  # type: ignore[arg-type]  # fmt: skip


def plan_of(run_dir: Path, *processes: Process) -> Plan:
    return Plan(
        graph="stub", source="stub", run_dir=str(run_dir), served_model="stub", release={}, endpoint="http://127.0.0.1:1", processes=processes,
        dirs=(str(run_dir / "logs"), str(run_dir / "plans"), str(run_dir / "cwd")),
    )  # fmt: skip


class StubSession(Session):
    """A session whose plan is given instead of compiled."""

    def __init__(self, state: Path, plan: Plan) -> None:
        self.given = plan
        super().__init__(str(Path(__file__).resolve().parents[2] / "graphs" / "mock.yaml"), [], state, View(quiet=True))

    @property
    def _embedded(self) -> bool:
        return False

    def _plan(self, release: Any) -> Plan:
        assert self.site is not None
        run_dir = self.site.run
        text = self.given.model_dump_json().replace(self.given.run_dir, str(run_dir))
        return Plan.model_validate_json(text)


def launch(state: str, plan: str) -> None:
    session = StubSession(Path(state), Plan.read(plan))

    async def main() -> None:
        task = asyncio.create_task(session.run())
        await session.planned.wait()
        assert session.supervisor is not None
        ready = asyncio.create_task(session.supervisor.ready.wait())
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        print("READY", session.supervisor.run_dir, flush=True)
        await task

    asyncio.run(main())


if __name__ == "__main__":
    for _ in range(int((sys.argv[3:] or ["1"])[0])):
        launch(*sys.argv[1:3])
        print("CLOSED", len(os.listdir("/proc/self/fd")), flush=True)
