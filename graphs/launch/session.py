"""One `dynamo serve` from graph file to drained: sweep, check, plan, preflight, store, publish, run, clean up."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError, nearest
from graphs.check import check_loaded
from graphs.compile import compile_plan
from graphs.launch import control, runs, store
from graphs.launch.preflight import preflight
from graphs.launch.supervisor import Supervisor
from graphs.launch.table import View
from graphs.load import Finding, Graph, read_graph
from graphs.plan import Plan
from graphs.site import Release, Site
from graphs.sockets import control_socket, make_socket_directory

SCALABLE = ("prefill", "decode", "aggregated", "router")
STORE_COMPONENTS = ("azurite",)


class Session:
    """Owns everything of one start. `graph_path` and `sets` are kept: scaling compiles again."""

    def __init__(self, graph_path: str, sets: list[str], state: Path, view: View) -> None:
        self.began = time.monotonic()
        self.path, self.sets, self.state, self.view = graph_path, list(sets), state, view
        self.graph: Graph = read_graph(graph_path, sets)
        raise_first([f for f in check_loaded(self.graph) if f.severity == "error"])
        if self.graph.spec.runtime.discovery == "kubernetes":
            raise DynamoBlobError(
                "LAUNCH-CLUSTER-GRAPH", "this graph is for a cluster", where=self.graph.place("runtime", "discovery"),
                do="render it (`dynamo render`), or serve one of graphs/*.yaml",
            )  # fmt: skip
        self.lock: runs.Lock | None = None
        self.supervisor: Supervisor | None = None
        self.site: Site | None = None
        self.phases: list[dict[str, Any]] = []
        self.planned = asyncio.Event()
        self.store_records = 0
        """Requests the store had served when publishing ended: what comes after is serving."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._interrupted = 0
        self._scaling = asyncio.Lock()

    def phase(self, name: str, start: float) -> None:
        self.phases.append(
            {
                "name": name,
                "start_s": round(start - self.began, 3),
                "end_s": round(time.monotonic() - self.began, 3),
                "start": 1,
            }
        )

    async def run(self, when_ready: Callable[[Session], Awaitable[None]] | None = None) -> None:
        """Serve until stopped; with `when_ready`, until it returns. Raises what ended the graph; everything is cleaned up then."""
        self._loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(sig, self.interrupt)
        start = time.monotonic()
        with runs.usable(self.state):
            for line in await asyncio.to_thread(runs.sweep, self.state):
                self.view.say(f"cleaned up after a killed launcher: {line}")
            if self.graph.spec.storage.embedded == "azurite":
                self.lock = runs.Lock(self.state / "azurite.lock")
            run_dir = runs.new_run(self.state, self.graph.spec.graph)
        self.site = Site(run=run_dir, state=self.state)
        issuer = None
        try:
            make_socket_directory(run_dir)
            release = store.known_release(self.graph, self.site) if self._embedded else None
            plan = self._plan(release)
            self._preflight(plan)
            self.phase("preflight", start)
            self.supervisor = Supervisor(plan, began=self.began, changed=self._changed)
            self.supervisor.phases.extend(self.phases)
            self.planned.set()
            server = await control.serve(control_socket(run_dir), self._control)
            if self._interrupted:
                self.supervisor.stop()
            if self._embedded:
                issuer = await asyncio.to_thread(store.prepare, self.graph, self.site)
            await self._supervise(plan, release, when_ready)
            server.close()
        finally:
            if issuer is not None:
                await asyncio.to_thread(issuer.close)
            self._close(run_dir)

    @property
    def _embedded(self) -> bool:
        return self.graph.spec.storage.embedded == "azurite"

    def _plan(self, release: Release | None) -> Plan:
        assert self.site is not None
        if release is not None:
            self.site = dataclasses.replace(self.site, release=release)
        plan = compile_plan(self.graph, self.site)
        runs.write_json(self.site.run / "plan.json", plan.model_dump(mode="json"))
        return plan

    def _preflight(self, plan: Plan) -> None:
        findings = preflight(plan)
        for finding in findings:
            if finding.severity == "warning":
                self.view.say(f"warning: {finding.as_error()}")
        raise_first([f for f in findings if f.severity == "error"])

    async def _supervise(
        self, plan: Plan, release: Release | None, when_ready: Callable[[Session], Awaitable[None]] | None
    ) -> None:
        supervisor = self.supervisor
        assert supervisor is not None
        tasks = [asyncio.create_task(self._bring_up(plan, release)), asyncio.create_task(self._refresh())]
        if when_ready is not None:
            tasks.append(asyncio.create_task(self._then_stop(when_ready)))
        try:
            await supervisor.run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _bring_up(self, plan: Plan, release: Release | None) -> None:
        """Everything at once when the release is known; else the store first, publish, plan again, the rest."""
        supervisor = self.supervisor
        assert supervisor is not None and self.site is not None
        try:
            if self._embedded and release is None:
                first = plan.model_copy(
                    update={"processes": tuple(p for p in plan.processes if p.component in STORE_COMPONENTS)}
                )
                supervisor.start(first, complete=False)
                await supervisor.children["azurite-0"].ready.wait()
                start = time.monotonic()
                await asyncio.to_thread(store.ensure_containers, self.graph, self.site)
                release = await asyncio.to_thread(
                    store.publish_missing, self.graph, self.site, self.view.say, supervisor.stopped
                )
                self.store_records = store.records(self.site)
                supervisor.phases.append(
                    {
                        "name": "publish",
                        "start_s": round(start - self.began, 3),
                        "end_s": round(supervisor.elapsed(), 3),
                        "start": 1,
                    }
                )
                plan = self._plan(release)
                supervisor.start(plan)
            else:
                supervisor.start(plan)
                if (
                    self._embedded
                ):  # a tenant's class may be new since the last start; KV is first stored long after this
                    await supervisor.children["azurite-0"].ready.wait()
                    await asyncio.to_thread(store.ensure_containers, self.graph, self.site)
        except DynamoBlobError as e:
            supervisor.fail(runs.full_disk(self.state, e) or e)
        except Exception as e:
            supervisor.fail(DynamoBlobError("LAUNCH-FAULT", "the start failed", why=f"{type(e).__name__}: {e}"))

    async def _then_stop(self, when_ready: Callable[[Session], Awaitable[None]]) -> None:
        supervisor = self.supervisor
        assert supervisor is not None
        await supervisor.ready.wait()
        try:
            await when_ready(self)
        except DynamoBlobError as e:
            supervisor.fail(e)
        except Exception as e:
            supervisor.fail(DynamoBlobError("LAUNCH-FAULT", "the question failed", why=f"{type(e).__name__}: {e}"))
        else:
            supervisor.stop()

    # -- from outside

    def interrupt(self) -> None:
        """Ctrl-C or SIGTERM: once to drain, again to kill."""
        self._interrupted += 1
        if self._interrupted == 1:
            self.view.say("draining: answers in flight finish; again to kill")
        if self.supervisor is not None:
            self.supervisor.stop()

    async def _control(self, message: dict[str, Any]) -> dict[str, Any]:
        supervisor = self.supervisor
        assert supervisor is not None
        match message.get("op"):
            case "status":
                return {**supervisor.snapshot(), "phases": supervisor.phases}
            case "stop":
                supervisor.stop()
                return {"stopping": True, "run_dir": str(supervisor.run_dir)}
            case "scale":
                async with self._scaling:  # one at a time: a replica that drains cannot be started again meanwhile
                    return await self._scale(str(message["component"]), int(message["replicas"]))
        raise DynamoBlobError("CONTROL-UNKNOWN", f"no operation {message.get('op')!r}", why="status, stop, scale")

    async def _scale(self, component: str, replicas: int) -> dict[str, Any]:
        supervisor = self.supervisor
        assert supervisor is not None
        if component not in SCALABLE:
            raise DynamoBlobError(
                "LAUNCH-SCALE", f"'{component}' cannot be scaled", where=f"{component}={replicas}", why=nearest(component, SCALABLE),
                do="name one of those, e.g. `dynamo scale decode=2`",
            )  # fmt: skip
        if supervisor.phase != "serving":
            raise DynamoBlobError(
                "LAUNCH-SCALE",
                "the graph is not serving",
                where=str(supervisor.run_dir),
                why=f"it is {supervisor.phase}",
                do="wait until `dynamo status` says serving",
            )
        sets = [s for s in self.sets if not s.startswith(f"components.{component}.replicas=")] + [
            f"components.{component}.replicas={replicas}"
        ]
        graph, before = read_graph(self.path, sets), self.graph
        if graph.document.text != before.document.text:
            raise DynamoBlobError(
                "LAUNCH-SCALE", "the graph file has changed since the start", where=self.path,
                why="new replicas would run another graph than those that serve", do="restart the graph, or put the file back",
            )  # fmt: skip
        raise_first([f for f in check_loaded(graph) if f.severity == "error"])
        if getattr(graph.spec.components, component) is None or getattr(before.spec.components, component) is None:
            raise DynamoBlobError(
                "LAUNCH-SCALE", f"the graph has no component '{component}'", where=self.path,
                do=f"add `{component}: {{}}` under `components` and restart the graph",
            )  # fmt: skip
        if replicas < 1:
            raise DynamoBlobError(
                "LAUNCH-SCALE", "a component keeps one replica at least", where=f"{component}={replicas}",
                do="give 1 or more; `dynamo stop` ends the graph",
            )  # fmt: skip
        known = {p.name for p in supervisor.plan.processes}
        self.graph = graph
        try:
            plan = self._plan(None)
            fresh = plan.model_copy(update={"processes": tuple(p for p in plan.processes if p.name not in known)})
            self._preflight(fresh)
        except DynamoBlobError:
            self.graph = before
            self._plan(None)
            raise
        self.sets = sets
        return await supervisor.scale(plan)

    # -- what is seen, and the end

    def _changed(self) -> None:
        if self.supervisor is not None:
            self.view.show(self.supervisor.snapshot())

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._changed()

    def _close(self, run_dir: Path) -> None:
        run = runs.Run.read(run_dir)
        runs.remove_traces(run)
        with suppress(OSError):
            runs.write_json(run_dir / "state.json", {**run.state, "phase": "closed"})
        if self.lock is not None:
            self.lock.release()


def raise_first(findings: list[Finding]) -> None:
    """The first finding as an error that names how many more there are."""
    if not findings:
        return
    error = findings[0].as_error()
    if len(findings) > 1:
        error.data["findings"] = [f.as_json() for f in findings]
        error.why += f" (and {len(findings) - 1} more: {', '.join(f.what for f in findings[1:4])})"
    raise error
