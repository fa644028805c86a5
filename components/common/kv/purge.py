"""Purge of a tenant's KV: deletes, and proves that nothing is left while others go on writing.

    1 state      _control/purges/<tenant>.json says that a purge is under way: killed at any point, the next call goes on
    2 raise      the tenant's generation: puts in flight land under names nobody looks at (epochs.py)
    3 rotate     the tenant's salt key: what lies in HBM and DRAM of any worker is out of reach at once
    4 delete     everything of older generations, in every container
    5 settle     until every worker has seen the generation or stopped, and its puts have met their deadline; then
                 every worker is asked whether an older put of its is still on its way all the same (fence.py)
    6 delete     what landed meanwhile
    7 prove      a fresh process with an empty index lists and asks; not clean = 6 again, a few times, then failure
    8 report     signed (Ed25519), stored beside the state

With `older_than_s` only objects written before that are deleted (steps 4 and 7); no generation, no key changes.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import Field

from components.common.config import Config
from components.common.errors import DynamoBlobError
from components.common.kv.containers import known, remember
from components.common.kv.fence import SILENT_S, Workers, asked
from components.common.kv.probe import ProbeConfig, is_old
from components.common.kv.store import PURGE_PREFIX, WORKERS_PREFIX, KvStore
from components.common.messages.salt import tenant_hash
from components.common.messages.tenants import can_rotate, rotate_salt_key
from components.common.registry.signing import SigningKey
from components.common.storage.config import AccountConfig
from components.common.storage.errors import StorageError

log = logging.getLogger(__name__)

FORMAT = "dynamo-blob.purge-report/1"
_BATCH = 512
_SAMPLE = 64
_ROUNDS = 5
_ASK_S = 0.5


class PurgeConfig(Config):
    account: AccountConfig = Field(description="KV account, identity with delete rights")
    control: str = Field(description="the graph's KV container")
    containers: tuple[str, ...] = Field(description="containers of the classes of now; those on record are added")
    tenant: str = Field(description="tenant's name")
    tenant_hash: str = Field("", description="32 hex; empty = derived from the name (PUBLIC = unsalted traffic)")
    older_than_s: float = Field(0.0, ge=0, description="only objects written longer ago, seconds; 0 = everything")
    salt_key_file: str = Field("", description="the tenant's salt key, replaced by a fresh one; empty = not done")
    settle_s: float = Field(50.0, ge=0, description="epochs_stale_s + store_deadline_s of the workers, seconds")
    overdue_s: float = Field(
        120.0,
        ge=0,
        description="seconds to wait for puts that workers report as past their deadline and still on their way",
    )
    directories: tuple[str, ...] = Field(
        (), description="workers that keep a directory tier (NVMe) of their own, by name"
    )
    directories_s: float = Field(
        10.0, gt=0, description="seconds until a worker that runs has looked through its directory"
    )
    probe_s: float = Field(300.0, gt=0, description="seconds the proving process may take")


@dataclass
class State:
    """What survives a kill. `phase`: raise, rotate, delete, settle, overdue, prove, done."""

    id: str
    tenant: str
    generation: int
    cutoff: float
    started: float
    phase: str = "raise"
    raised_at: float = 0.0
    rotated: bool = False
    deleted: int = 0
    deleted_bytes: int = 0
    late: int = 0
    resumed: int = 0
    aged: float = 0.0  # the latest cutoff of all age purges so far: workers that did not run meanwhile go by it
    sample: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def parse(cls, raw: bytes, tenant: str) -> State | None:
        """The state of a purge of `tenant`; None for anything else, also what another version wrote."""
        try:
            body = json.loads(raw)
            state = cls(**body)
            state.sample = [(str(container), str(name)) for container, name in state.sample]
            kinds = {f.name: f.type for f in fields(cls) if f.name != "sample"}
            sound = all(type(body[n]).__name__ in ("int", k) for n, k in kinds.items() if n in body)
            numbers = (state.cutoff, state.started, state.raised_at, state.generation, state.aged)
            if not sound or state.tenant != tenant or not all(math.isfinite(x) and x >= 0 for x in numbers):
                return None
            return state if isinstance(state.id, str) and isinstance(state.phase, str) else None
        except (ValueError, TypeError, RecursionError, OverflowError):
            return None


class Purge:
    """One purge. `step` is called with the name of each phase as it begins (progress; tests stop there)."""

    def __init__(
        self, config: PurgeConfig, store: KvStore, key: SigningKey, *, step: Callable[[str, State], None] | None = None
    ) -> None:
        self.config, self.store, self._key = config, store, key
        self._step = step or (lambda _phase, _state: None)
        self.tenant = config.tenant_hash or tenant_hash(config.tenant)
        self._object = f"{PURGE_PREFIX}{self.tenant}{'.age' if config.older_than_s else ''}.json"
        self._containers = tuple(dict.fromkeys((config.control, *config.containers)))
        self._raised = 0.0

    def run(self) -> dict[str, Any]:
        """The signed report. Raises KV-PURGE-UNPROVEN, StorageError; either way the next call goes on where this one stopped.

        Raises TENANTS-SALT-KEY-FIXED before anything was changed.
        """
        if self.config.salt_key_file and not self.config.older_than_s:
            can_rotate(Path(self.config.salt_key_file))
        remember(self.store, self._containers)
        state = self._begin()
        if not self.config.older_than_s:
            self._raise(state)
            self._rotate(state)
        self._enter(state, "delete")
        self._delete(state)
        if not self.config.older_than_s:
            self._enter(state, "settle")
            self._settle()
        workers = Workers([], {}, {}) if self.config.older_than_s else self._ask(state)
        proof: dict[str, Any] = {}
        for round_ in range(_ROUNDS):
            self._enter(state, "prove")
            if round_ or not self.config.older_than_s:
                state.late += self._delete(state)
            proof = self._prove(state)
            if proof.get("clean"):
                break
        else:
            raise DynamoBlobError(
                "KV-PURGE-UNPROVEN", f"objects of tenant '{self.config.tenant}' are still found after {_ROUNDS} rounds",
                where=self._where(), why=json.dumps(proof)[:500],
                do="a writer outlives its deadlines or cannot read _control/epochs.json: stop it, then call purge again", probe=proof,
            )  # fmt: skip
        return self._report(state, proof, workers)

    # --- phases

    def _begin(self) -> State:
        raw, _ = self.store.read(self._object)
        aged = 0.0
        if raw is not None:
            state = State.parse(raw, self.tenant)
            if state is None:  # a fresh purge covers whatever that one did and did not
                log.warning(
                    "KV-PURGE-STATE: %s says nothing of use; the purge begins anew",
                    self.store.account.uri(self.store.control, self._object),
                )
            else:
                aged = max(state.aged, state.cutoff)
            if state is not None and state.phase != "done":
                state.resumed += 1
                state.id = uuid.uuid4().hex  # the first attempt may still be running: each has a report of its own
                if self.config.older_than_s:  # the age asked for now; what is recomputed meanwhile has its old name
                    state.sample = []
                    self._date(state)
                else:  # whatever was written since the first attempt falls under this one
                    state.generation = self.store.read_epochs().get(self.tenant, 0) + 1
                    state.raised_at, state.rotated = 0.0, False
                self._save(state)
                self._step("resume", state)
                return state
        generation = 0 if self.config.older_than_s else self.store.read_epochs().get(self.tenant, 0) + 1
        now = time.time()
        state = State(uuid.uuid4().hex, self.tenant, generation, 0.0, now, aged=aged)
        self._save(state)
        if self.config.older_than_s:
            self._date(state)
            self._save(state)
        self._step("begin", state)
        return state

    def _date(self, state: State) -> None:
        """The cutoff, by the service's clock, which also stamps the objects."""
        self._save(state)
        found = self.store.account.find(self.store.control, self._object)
        before, now = state.cutoff, found.modified if found else time.time()
        state.cutoff = max(1.0, now - self.config.older_than_s)  # 0 would mean: by generation
        state.aged = max(state.aged, before, state.cutoff)

    def _raise(self, state: State) -> None:
        self._enter(state, "raise")
        if not state.sample:  # before the sweeper, too, knows that they are old: the proof asks for some by name
            state.sample = self._known(state)
        if self.store.read_epochs().get(self.tenant, 0) < state.generation:
            state.generation = self.store.raise_epoch(self.tenant, at_least=state.generation)
        state.raised_at = state.raised_at or time.time()
        self._raised = time.monotonic()  # waited from here: always in this process, and clocks jump
        self._save(state)

    def _known(self, state: State) -> list[tuple[str, str]]:
        """Up to _SAMPLE / 2 (container, name) that this purge must make disappear; the first ones of each container."""
        self._containers = tuple(dict.fromkeys((*self._containers, *known(self.store))))
        newest, each = self.store.read_epochs().get(self.tenant, 0), _SAMPLE // 2 // len(self._containers) or 1
        out: list[tuple[str, str]] = []
        for container in self._containers:
            old = (
                (container, i.name) for i in self.store.list(container, f"{self.tenant}/")
                if is_old(i.name, i.modified, state.generation, newest, state.cutoff)
            )  # fmt: skip
            out += itertools.islice(old, each)
        return out

    def _rotate(self, state: State) -> None:
        if self.config.salt_key_file and not state.rotated:
            self._enter(state, "rotate")
            try:
                rotate_salt_key(Path(self.config.salt_key_file))
            except OSError as e:
                raise DynamoBlobError(
                    "TENANTS-SALT-KEY-FIXED", "the tenant's salt key was not replaced; its generation was raised", where=self.config.salt_key_file,
                    why=e.strerror or str(e), do="see to it that the file can be written and call purge again: it goes on from there",
                ) from None  # fmt: skip
            state.rotated = True
            self._save(state)

    def _settle(self) -> None:
        time.sleep(max(0.0, self._raised + self.config.settle_s - time.monotonic()))

    def _ask(self, state: State) -> Workers:
        """What the workers say, once none has an older put under way. Raises KV-PURGE-UNPROVEN after `overdue_s`."""
        end = time.monotonic() + self.config.overdue_s
        while (found := asked(self.store, self.tenant, state.generation)).waiting:
            if state.phase != "overdue":
                self._enter(state, "overdue")
            if time.monotonic() >= end:
                raise DynamoBlobError(
                    "KV-PURGE-UNPROVEN", f"puts for tenant '{self.config.tenant}' from before the purge are still under way",
                    where=self._where(), why="; ".join(f"{w}: {n} put{'s' * (n > 1)}" for w, n in found.waiting.items()),
                    do="the store or the network holds them: call purge again later, or end these workers",
                )  # fmt: skip
            time.sleep(_ASK_S)
        return found

    def _delete(self, state: State) -> int:
        """One pass over every container; objects deleted. Progress is saved per batch."""
        self._containers = tuple(dict.fromkeys((*self._containers, *known(self.store))))
        done, newest = 0, self.store.read_epochs().get(self.tenant, 0)
        failed: dict[str, str] = {}
        for container in self._containers:
            batch: list[tuple[str, int]] = []
            for info in self.store.list(container, f"{self.tenant}/"):
                if is_old(info.name, info.modified, state.generation, newest, state.cutoff):
                    batch.append((info.name, info.size))
                if len(batch) >= _BATCH:
                    done += self._delete_batch(state, container, batch, failed)
                    batch = []
            done += self._delete_batch(state, container, batch, failed)
        if failed:  # said at the end: one that cannot be deleted keeps no other
            uri, why = next(iter(failed.items()))
            raise StorageError(
                why, f"{len(failed)} objects cannot be deleted", where=uri, why="see the code; the purge is not over, all others are gone",
                do="call purge again: it goes on where it stopped",
            )  # fmt: skip
        return done

    def _delete_batch(self, state: State, container: str, batch: list[tuple[str, int]], failed: dict[str, str]) -> int:
        if not batch:
            return 0
        sizes = dict(batch)
        done = self.store.delete(container, sizes)
        failed |= {self.store.account.uri(container, name): why for name, why in done.failed.items()}
        state.deleted += len(done.deleted)
        state.deleted_bytes += sum(sizes[n] for n in done.deleted)
        room = _SAMPLE - len(state.sample)
        state.sample += [(container, n) for n in done.deleted[:: max(1, len(done.deleted) // 16)][:room]]
        self._save(state)
        self._step("deleted", state)
        return len(done.deleted)

    def _prove(self, state: State) -> dict[str, Any]:
        plan = ProbeConfig(
            account=self.config.account, control=self.config.control, containers=self._containers, tenant=self.tenant,
            generation=state.generation, modified_before=state.cutoff, absent=tuple(state.sample),
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="dynamo-blob-probe-") as folder:
            path = Path(folder) / "probe.json"
            path.write_text(plan.model_dump_json())
            try:
                ran = subprocess.run(
                    [sys.executable, "-m", "components.common.kv.probe", "--plan", str(path)],
                    capture_output=True, text=True, timeout=self.config.probe_s, check=False, cwd=Path(__file__).parents[3],
                )  # fmt: skip
                found = json.loads(ran.stdout.strip().splitlines()[-1])
                if not isinstance(found, dict):
                    raise ValueError("no object")
            except (subprocess.TimeoutExpired, ValueError, IndexError) as e:
                return {"clean": False, "error": f"the proving process gave no answer: {type(e).__name__}"}
        if found.get("pid") == os.getpid():
            return {"clean": False, "error": "the proving process is this one"}
        return dict(found)

    def _report(self, state: State, proof: dict[str, Any], workers: Workers) -> dict[str, Any]:
        finished, protection = time.time(), self.store.protection()
        report = {
            "format": FORMAT, "id": state.id, "tenant": self.config.tenant, "tenant_hash": self.tenant,
            "account": self.config.account.url, "containers": list(self._containers), "generation": state.generation,
            "older_than_s": self.config.older_than_s, "cutoff": state.cutoff, "started": state.started, "finished": finished,
            "deleted": state.deleted, "deleted_bytes": state.deleted_bytes, "late": state.late, "resumed": state.resumed,
            "salt_key": "rotated" if state.rotated else "kept", "memory": _memory(state, self.config),
            "protection": protection, "recoverable": recoverable(protection, finished), "probe": proof,
            "directories": _directories(self.config),
            "workers": {"confirmed": workers.confirmed, "silent": workers.silent},
        }  # fmt: skip
        signed = self._key.sign(report)
        self.store.write(f"{PURGE_PREFIX}{state.id}.report.json", signed)
        self._enter(state, "done")
        dead = [f"{WORKERS_PREFIX}{w}.json" for w, at in workers.silent.items() if finished - at > SILENT_S]
        self.store.delete(self.store.control, dead)
        return dict(json.loads(signed))

    # --- state

    def _enter(self, state: State, phase: str) -> None:
        state.phase = phase
        self._save(state)
        self._step(phase, state)

    def _save(self, state: State) -> None:
        self.store.write(self._object, json.dumps(asdict(state)).encode())

    def _where(self) -> str:
        return self.store.account.uri(self._containers[0], f"{self.tenant}/")


def recoverable(protection: dict[str, Any], at: float) -> dict[str, Any]:
    """Until when what was deleted at `at` can still be brought back, and by what: {until, why}.

    `until`: Unix seconds, 0 = not at all, -1 = no end known.
    """
    if protection["versioning"]:
        return {
            "until": -1,
            "why": "blob versioning keeps what was deleted until a lifecycle rule removes old versions",
        }
    if not protection["known"]:
        return {
            "until": -1,
            "why": f"the account would not say ({protection.get('why', '')}): recoverable until proven otherwise",
        }
    if protection["soft_delete_days"]:
        days = protection["soft_delete_days"]
        return {"until": at + 86400 * days, "why": f"soft delete keeps it for {days} days"}
    return {"until": 0, "why": "neither soft delete nor versioning on this account"}


def _directories(config: PurgeConfig) -> dict[str, Any]:
    """What holds for files on the nodes' own disks, which no proof from here can see."""
    if not config.directories:
        return {"workers": [], "says": "no worker keeps KV in a directory of its node"}
    soon = f"each of these workers deletes them within {config.directories_s:g} s and a millisecond a file, one that does not run at its next start"
    if config.older_than_s:
        return {
            "workers": list(config.directories),
            "says": f"NOT proven: files written before the cutoff may be used until they are deleted; {soon}",
        }
    return {
        "workers": list(config.directories),
        "says": f"unreachable: the generation is part of every file's name; {soon}",
    }


def _memory(state: State, config: PurgeConfig) -> str:
    if config.older_than_s:
        return "HBM and DRAM of workers untouched: entries there live for minutes and only while used"
    if state.rotated:
        return (
            "HBM and DRAM of workers: unreachable, the tenant's salt key was replaced; overwritten as memory is reused"
        )
    return "HBM and DRAM of workers: NOT covered, the salt key was kept; restart the workers, or replace the key before the purge"
