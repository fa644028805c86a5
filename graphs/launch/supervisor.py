"""Runs a plan: starts processes as early as their dependencies allow, keeps them running within a budget, drains.

Ready means ready: a process's state comes from its probe alone, and the graph is ready when all are.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError
from graphs.launch import proc
from graphs.launch.child import Child, become_subreaper, raise_descriptors, reap_adopted
from graphs.launch.probe import check, look
from graphs.launch.runs import write_json
from graphs.plan import Plan, Process

DRAIN_ORDER = (
    ("frontend",),
    ("dynamo-frontend", "router", "prefill", "decode", "aggregated"),
    ("weights", "sweeper"),
    ("azurite", "events", "etcd", "nats"),
)
PROBE_EVERY_S, WATCH_EVERY_S, PROBE_MISSES = 0.2, 2.0, 2
WORKERS, LEASE_S = ("prefill", "decode", "aggregated"), 7.5
"""A worker silent for longer than LEASE_S has lost its lease (10 s, file discovery) and is restarted when it wakes."""
BACK_OFF_S, BACK_OFF_MOST_S = 0.25, 10.0
SERVES_WITHOUT = ("router", "events", "sweeper")
"""Their death costs the hint, the routing news, the deletions; answers stay whole."""
RETRY_S, RETRY_MOST_S = 60.0, 600.0
"""How long after it failed alone a process is tried again, doubling."""


class Supervisor:
    """One running graph. `changed` is called after every change of a state; it must not block."""

    def __init__(self, plan: Plan, *, began: float | None = None, changed: Callable[[], None] = lambda: None) -> None:
        self.plan, self.run_dir, self.changed = plan, Path(plan.run_dir), changed
        self.began = time.monotonic() if began is None else began
        self.children: dict[str, Child] = {}
        self.phases: list[dict[str, Any]] = []
        self.phase = "starting"
        self.failure: DynamoBlobError | None = None
        self.note = ""
        """What is wrong with the launcher's own notes; empty when nothing is."""
        self.ready = asyncio.Event()
        self._minders: dict[str, asyncio.Task[None]] = {}
        self._complete = False
        self._stop = asyncio.Event()
        self.stopped = threading.Event()
        """Set with the wish to stop, for work in threads."""
        self._force = asyncio.Event()
        self._old_sessions: set[int] = set()
        become_subreaper()
        raise_descriptors()

    # -- life

    def start(self, plan: Plan | None = None, *, complete: bool = True) -> None:
        """Start every process of `plan` (default: the whole plan) that is not known yet. `complete`: no more will follow."""
        self.plan, self._complete = plan or self.plan, complete
        for path in self.plan.dirs:
            Path(path).mkdir(parents=True, exist_ok=True, mode=0o700)
        for process in self.plan.processes:
            if process.name not in self.children:
                self._add(process)
        self._note()

    def _add(self, process: Process) -> None:
        child = self.children[process.name] = Child(process, self.run_dir)
        child.began = self.elapsed()
        self._minders[process.name] = asyncio.create_task(self._mind(child), name=f"mind-{process.name}")

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def stop(self) -> None:
        """First call: drain. Second call: kill at once."""
        (self._force if self._stop.is_set() else self._stop).set()
        self.stopped.set()

    def fail(self, error: DynamoBlobError) -> None:
        """End the graph. What fails after it was told to stop is a consequence, not a reason."""
        if not self._stop.is_set():
            self.failure = error
        self._stop.set()
        self.stopped.set()

    async def run(self) -> None:
        """Until stopped; drained when it returns. Raises the failure that ended the graph, if one did."""
        keeper = asyncio.create_task(self._keep())
        try:
            await self._stop.wait()
        finally:
            await self._drain()
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper
            self._note()
        if self.failure:
            raise self.failure

    async def scale(self, plan: Plan) -> dict[str, list[str]]:
        """Move to another plan of the same graph: drain what is gone, start what is new."""
        wanted = {p.name for p in plan.processes}
        gone = [c for n, c in self.children.items() if n not in wanted]
        new = [n for n in wanted if n not in self.children]
        self.plan = plan
        self.start()
        await asyncio.gather(*(self._retire(c) for c in gone))
        self._note()
        return {"started": sorted(new), "drained": sorted(c.name for c in gone)}

    async def _retire(self, child: Child) -> None:
        self._minders.pop(child.name).cancel()
        await child.stop(child.process.grace_s)
        self._forget(child)
        self.children.pop(child.name, None)

    # -- one process

    async def _mind(self, child: Child) -> None:
        """Start, wait for ready, watch, restart: until told to stop or the budget is spent."""
        try:
            while not self._stop.is_set():
                await self._dependencies(child)
                if child.stopping or self._stop.is_set():  # a dependency may become ready while the graph drains
                    return
                try:
                    await self._once(child)
                except DynamoBlobError as e:
                    if child.stopping or not self._dispensable(child):
                        raise
                    await self._fail_alone(child, e)
                if child.stopping:
                    return
        except asyncio.CancelledError:
            raise
        except DynamoBlobError as e:
            self._set(child, "failed", e.what)
            self.fail(e)
        except Exception as e:  # a fault of ours must end the graph, not hang it
            self._set(child, "failed", f"{type(e).__name__}: {e}")
            self.fail(
                DynamoBlobError(
                    "LAUNCH-FAULT",
                    f"{child.name} cannot be supervised",
                    where=str(child.log),
                    why=f"{type(e).__name__}: {e}",
                )
            )

    async def _once(self, child: Child) -> None:
        """One life of the process. Raises what ends the attempts."""
        self._set(child, "starting")
        child.spawn()
        self._note()
        if await self._until_ready(child):
            await self._watch(child)
        if not child.stopping and not self._stop.is_set():
            await self._ended(child)

    async def _dependencies(self, child: Child) -> None:
        for name in child.process.after:
            other = self.children.get(name)
            if other is not None and not other.ready.is_set():
                self._set(child, "waiting", f"for {name}")
                await other.ready.wait()

    async def _until_ready(self, child: Child) -> bool:
        """True when the probe passed; False when the process exited first. At the deadline raises LAUNCH-NOT-READY; a process that
        was ready before is killed instead, at the cost of its restart budget: its graph serves without it meanwhile."""
        probe = child.process.probe
        deadline = probe.deadline_s if probe else 0.0
        while not child.exited.is_set():
            why = await check(probe)
            if child.exited.is_set():
                break
            if not why:
                self._became_ready(child)
                return True
            self._set(child, "starting", why)
            if time.monotonic() - child.spawned > deadline:
                if child.was_ready:
                    child.signal(signal.SIGKILL)
                    await child.exited.wait()
                    break
                raise DynamoBlobError(
                    "LAUNCH-NOT-READY", f"{child.name} was not ready in {deadline:g} s", where=str(child.log), why=why,
                    do="its log says more; a slow machine needs a larger ready_deadline_s in the profile",
                )  # fmt: skip
            with suppress(TimeoutError):
                await asyncio.wait_for(child.exited.wait(), PROBE_EVERY_S)
        return False

    def _became_ready(self, child: Child) -> None:
        after = time.monotonic() - child.spawned
        child.ready_after, child.was_ready = round(after, 3), True
        start = self.elapsed() - after
        self.phases.append(
            {"name": child.name, "start_s": round(start, 3), "end_s": round(start + after, 3), "start": child.starts}
        )
        child.shm = proc.shm_in_use(proc.session_members(child.popen.pid)) if child.popen else set()
        child.ready.set()
        self._set(child, "ready")
        if self.phase == "starting" and self._complete and all(c.ready.is_set() for c in self.children.values()):
            self.phase = "serving"
            self.phases.append({"name": "graph ready", "start_s": 0.0, "end_s": round(self.elapsed(), 3), "start": 1})
            self.ready.set()
            self._note()

    async def _watch(self, child: Child) -> None:
        """Until it exits. A probe that fails twice shows as `unready`. What answers nothing at all for `frozen_s` is killed."""
        misses, silent, p = 0, 0.0, child.process
        most_s = WATCH_EVERY_S + (p.probe.timeout_s if p.probe else 0.0) + 0.5
        while not child.exited.is_set():
            began = time.monotonic()
            with suppress(TimeoutError):
                await asyncio.wait_for(child.exited.wait(), WATCH_EVERY_S)
                return
            if child.stopping:
                continue
            stopped = (found := proc.stat(child.pid or 0)) is not None and found.state == "T"
            answered, why = (False, "stopped by a signal (SIGSTOP)") if stopped else await look(p.probe)
            misses = misses + 1 if why else 0
            was_silent = silent + min(time.monotonic() - began, most_s)  # the launcher may have been stopped as well
            silent = 0.0 if answered else was_silent
            frozen = 0 < p.frozen_s < silent and misses >= PROBE_MISSES
            # Dynamo never registers a worker again whose lease ran out: it would be healthy and idle for ever.
            lost = not why and p.component in WORKERS and was_silent > LEASE_S
            if (frozen or lost) and not child.exited.is_set():
                fate = "its lease is lost, it is restarted" if lost else f"{why}; it is killed and restarted"
                self._set(child, "unready", f"silent for {was_silent:.0f} s: {fate}")
                child.signal(signal.SIGTERM if lost else signal.SIGKILL)
                silent = 0.0
                continue
            if not child.exited.is_set() and not child.stopping and (not why or misses >= PROBE_MISSES):
                self._set(child, "unready" if why else "ready", why)
            child.rotate()

    async def _ended(self, child: Child) -> None:
        """After an exit nobody asked for: restart with back-off, or give up."""
        child.ready.clear()
        text = child.exit_text()
        code = child.popen.returncode if child.popen else None
        await child.end_session()
        now, p = time.monotonic(), child.process
        child.exits.append(now)
        recent = [t for t in child.exits if now - t <= p.restart_window_s]
        if now - child.spawned > p.restart_window_s:
            child.failures = 0
        # A refusal at the first start (bad weights, taken port) repeats itself: show it instead of trying again.
        if not child.was_ready and code is not None and code > 0:
            raise DynamoBlobError(
                "LAUNCH-START-FAILED",
                f"{child.name} refused to start",
                where=str(child.log),
                why=text,
                do="correct what its error names",
            )
        if len(recent) > p.restarts:
            raise DynamoBlobError(
                "LAUNCH-RESTARTS-SPENT", f"{child.name} ended {len(recent)} times in {p.restart_window_s:g} s", where=str(child.log), why=text,
                do="its log says why; `restarts` of the component is the budget",
            )  # fmt: skip
        wait = min(BACK_OFF_MOST_S, BACK_OFF_S * 2 ** (len(recent) - 1))
        self._set(child, "backing-off", f"{text}; restart {len(recent)} of {p.restarts} in {wait:g} s")
        await self._pause(wait)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    def _dispensable(self, child: Child) -> bool:
        """Does the graph serve without it? Until it served once, nothing is missing without a reason to end the start."""
        if self.phase != "serving":
            return False
        same = [c for c in self.children.values() if c.process.component == child.process.component and c is not child]
        return child.process.component in SERVES_WITHOUT or any(c.state != "failed" and not c.stopping for c in same)

    async def _fail_alone(self, child: Child, error: DynamoBlobError) -> None:
        """Shown as failed while the graph goes on; tried again after a long while."""
        await child.end_session()
        child.failures += 1
        wait = min(RETRY_MOST_S, RETRY_S * 2 ** (child.failures - 1))
        self._set(child, "failed", f"{error.what}: {error.why}; the graph serves without it; tried again in {wait:g} s")
        self._note()
        await self._pause(wait)

    # -- the whole graph

    async def _drain(self) -> None:
        self.phase = "draining"
        self._note()
        for child in self.children.values():
            child.stopping = True
        killer = asyncio.create_task(self._kill_when_forced())
        for group in DRAIN_ORDER:
            members = [c for c in self.children.values() if c.process.component in group]
            await asyncio.gather(*(c.stop(0.0 if self._force.is_set() else c.process.grace_s) for c in members))
            for child in members:
                self._forget(child)
            self._note()
        for task in self._minders.values():
            task.cancel()
        killer.cancel()
        await asyncio.gather(killer, *self._minders.values(), return_exceptions=True)
        left = await asyncio.to_thread(proc.end, self.run_dir, self.sessions())
        self._reap()
        if left and self.failure is None:
            self.failure = DynamoBlobError(
                "LAUNCH-LEFTOVER", "processes outlived the drain", where=str(self.run_dir), why=f"pids {left}"
            )
        self.phase = "drained"

    async def _kill_when_forced(self) -> None:
        await self._force.wait()
        for child in self.children.values():
            child.signal(9)

    async def _keep(self) -> None:
        """Twice a second: collect adopted orphans; now and then note the shared memory in use."""
        seen: set[str] = set()
        while True:
            await asyncio.sleep(0.5)
            self._reap()
            with suppress(OSError):
                now = {p.name for p in proc.SHM.iterdir()}
                if now != seen:
                    seen = now
                    for child in self.children.values():
                        if child.pid:
                            child.shm |= proc.shm_in_use(proc.session_members(child.pid))
                    self._note()

    def _reap(self) -> None:
        reap_adopted({c.popen.pid for c in self.children.values() if c.popen is not None})

    def _forget(self, child: Child) -> None:
        if child.popen:
            self._old_sessions.add(child.popen.pid)

    def sessions(self) -> set[int]:
        return {c.popen.pid for c in self.children.values() if c.popen} | self._old_sessions

    # -- what others see

    def _set(self, child: Child, state: str, why: str = "") -> None:
        if (child.state, child.why) == (state, why) or (child.stopping and state in ("ready", "unready", "starting")):
            return
        child.state, child.why = state, why
        self.changed()

    def _note(self) -> None:
        """Write state.json: what the next start needs to clean up after us, whatever happens to us."""
        me = proc.stat(os.getpid())
        assert me is not None
        shm = sorted(set().union(*(c.shm for c in self.children.values())) if self.children else set())
        state = {
            **self.snapshot(), "launcher": {"pid": me.pid, "start": me.start}, "sessions": sorted(self.sessions()), "shm_files": shm,
            "shm_dir": self.plan.shm_dir,
        }  # fmt: skip
        try:
            write_json(self.run_dir / "state.json", state)
            write_json(self.run_dir / "phases.json", self.phases)
            self.note = ""
        except OSError as e:  # a full disk must not end what serves, nor keep the drain from happening
            self.note = f"the run directory cannot be written: {e.strerror}"
        self.changed()

    def snapshot(self) -> dict[str, Any]:
        order = {p.name: i for i, p in enumerate(self.plan.processes)}
        children = sorted(self.children.values(), key=lambda c: order.get(c.name, 99))
        rows = []
        for child in children:
            row = child.snapshot()
            row["progress"] = progress(self.run_dir, child.name) if child.state == "starting" else ""
            rows.append(row)
        return {
            "graph": self.plan.graph, "phase": self.phase, "endpoint": self.plan.endpoint, "model": self.plan.served_model, "engine": self.plan.engine_kind,
            "release": self.plan.release, "run_dir": str(self.run_dir), "elapsed_s": round(self.elapsed(), 1), "note": self.note, "processes": rows,
        }  # fmt: skip


def progress(run_dir: Path, name: str) -> str:
    """Weights verified so far, from the loader's report; empty when there is none."""
    try:
        report = json.loads((run_dir / "reports" / f"{name}.weights.json").read_text())
    except (OSError, ValueError):
        return ""
    done = report.get("verified_bytes", 0)
    total = report.get("manifest_bytes") or report.get("total_bytes") or 0
    return f"{done / 1e6:.0f} of {total / 1e6:.0f} MB verified" if total else f"{done / 1e6:.0f} MB verified"
