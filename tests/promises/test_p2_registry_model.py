"""P2, the registry under crashes and races: no release ever half visible, no referenced object ever collected.

Publishers, promoters, a retirer and collectors run at the same time against one store. A scheduler holds
every storage call, reads included, and lets hypothesis choose who goes next and who dies there. After
every single call the invariants are checked; at the end the survivors' work must be complete and
whatever died must be finishable by running it again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from components.common.errors import DynamoBlobError
from components.common.registry import audit, upload
from components.common.registry.approve import approve
from components.common.registry.channel import read_channel
from components.common.registry.config import ReleaseConfig, TrustConfig
from components.common.registry.layout import Layout
from components.common.registry.manifest import Manifest
from components.common.registry.promote import promote, rollback
from components.common.registry.publish import publish_directory
from components.common.registry.release import load, resolve
from components.common.registry.retire import collect, retire
from components.common.registry.signing import SigningKey
from tests.memory_account import Blobs, MemoryAccount
from tests.registry_store import PROVENANCE, write_model

LAYOUT, MODEL = Layout("weights"), "m"
PUBLISHER, APPROVER = SigningKey.generate(), SigningKey.generate()
TRUST = TrustConfig(require="approval", publisher_keys=(PUBLISHER.public,), approver_keys=(APPROVER.public,))
EXPECTED = {
    "REGISTRY-CHANNEL-LOST", "REGISTRY-CHANNEL-EMPTY", "REGISTRY-VERSION-IN-USE", "REGISTRY-VERSION-RETIRED", "REGISTRY-RELEASE-MISSING",
    "REGISTRY-RELEASE-INCOMPLETE", "REGISTRY-UNAPPROVED", "REGISTRY-VERSION-TAKEN",
}  # fmt: skip
"""What an operation may be told when another was faster. Anything else is a fault."""


READS = {"get", "head", "list", "staged"}


class Crash(BaseException):
    """kill -9 at this very call."""


class Scheduler:
    """Runs operations in threads, one storage call at a time, in the order `choose` gives."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs
        self.waiting: dict[int, str] = {}
        self.gates: dict[int, threading.Event] = {}
        self.doomed: set[int] = set()
        self.results: dict[int, BaseException | None] = {}
        self.threads: list[threading.Thread] = []
        self.turn = threading.Condition()
        self.calls = 0

    def start(self, operation: Callable[[MemoryAccount], object]) -> None:
        me = len(self.threads)
        self.gates[me] = threading.Event()

        def hook(call: str) -> None:
            if me in self.doomed:
                raise Crash
            with self.turn:
                self.waiting[me] = call
                self.turn.notify_all()
            assert self.gates[me].wait(60)
            self.gates[me].clear()
            if me in self.doomed:
                raise Crash

        def work() -> None:
            result: BaseException | None = None
            try:
                operation(MemoryAccount(self.blobs, f"op{me}", hook))
            except BaseException as e:
                result = e
            with self.turn:
                self.results[me] = result
                self.waiting.pop(me, None)
                self.turn.notify_all()

        thread = threading.Thread(target=work, daemon=True)
        self.threads.append(thread)
        thread.start()

    def settle(self) -> list[int]:
        """Wait until every operation is done or held at a call; those that are held."""
        with self.turn:
            assert self.turn.wait_for(lambda: len(self.waiting) + len(self.results) == len(self.threads), 60), (
                "an operation hangs"
            )
            return sorted(self.waiting)

    def step(self, who: int, *, crash: bool = False) -> None:
        """Let `who` make the call it is held at (or die there), then check what everybody can see."""
        with self.turn:
            call = self.waiting.pop(who)
            if crash:
                self.doomed.add(who)
        self.calls += 1
        self.gates[who].set()
        self.settle()
        if call.split()[0] not in READS:
            check_now(self.blobs)


@dataclass(frozen=True)
class Op:
    kind: str
    version: str = ""

    def run(self, models: Path) -> Callable[[MemoryAccount], object]:
        def operation(account: MemoryAccount) -> object:
            a: object = account
            if self.kind == "publish":
                return publish_directory(
                    a,
                    "weights",
                    models / self.version,
                    MODEL,
                    self.version,
                    key=PUBLISHER,
                    provenance=PROVENANCE,
                    parallel=1,
                )  # type: ignore[arg-type]
            if self.kind == "promote":
                return promote(a, LAYOUT, MODEL, self.version, APPROVER, TRUST)  # type: ignore[arg-type]
            if self.kind == "rollback":
                return rollback(a, LAYOUT, MODEL, APPROVER)  # type: ignore[arg-type]
            if self.kind == "retire":
                return retire(a, LAYOUT, MODEL, self.version, APPROVER)  # type: ignore[arg-type]
            return collect(a, LAYOUT, dry_run=False, grace_s=-1, abandoned_s=10, now=account.blobs.clock)  # type: ignore[arg-type]

        return operation


def check_now(blobs: Blobs) -> None:
    """Invariants, at every moment: looked at without the scheduler."""
    eye: object = MemoryAccount(blobs)
    for name in list(blobs.containers["weights"]):
        if name.startswith("releases/") and name.endswith("manifest.sig"):
            version = name.split("/")[-2]
            try:
                stored = load(eye, LAYOUT, MODEL, version)  # type: ignore[arg-type]
            except DynamoBlobError as e:
                assert e.code == "REGISTRY-VERSION-RETIRED", f"{version} is visible and broken: {e}"
                continue
            missing = [
                f.path
                for f in stored.manifest.files
                if f.blob not in blobs.containers["weights"] or not blobs.containers["weights"][f.blob].committed
            ]
            assert not missing, f"{version} is visible and lacks {missing}"
    channel = read_channel(eye, LAYOUT, MODEL)  # type: ignore[arg-type]
    if channel:
        for pointer in ("current", "previous"):
            version = getattr(channel, pointer)
            if version:
                load(eye, LAYOUT, MODEL, version)  # type: ignore[arg-type]
        if channel.current:
            found = resolve(eye, ReleaseConfig(model=MODEL), TRUST, record=False)  # type: ignore[arg-type]
            assert found.manifest.version == channel.current
        assert not set(channel.retired) & {channel.current, channel.previous}
    audit.read(eye, LAYOUT, MODEL)  # type: ignore[arg-type]


@functools.cache
def _prepared(models: Path) -> Blobs:
    """1 and 2 published, approved and promoted; 3 published and approved; time has passed since."""
    blobs = Blobs()
    account: object = MemoryAccount(blobs)
    for container in LAYOUT.containers:
        blobs.containers[container] = {}
    for version in "123":
        publish_directory(account, "weights", models / version, MODEL, version, key=PUBLISHER, provenance=PROVENANCE)  # type: ignore[arg-type]
        _approve(account, version)
    for version in "12":
        promote(account, LAYOUT, MODEL, version, APPROVER, TRUST)  # type: ignore[arg-type]
    blobs.clock += 5
    return blobs


def prepared(models: Path) -> Blobs:
    return _prepared(models).copy()


def _approve(account: object, version: str) -> None:
    """The approval, without reading every byte (there is no socket to read ranges from)."""
    import components.common.registry.approve as module
    from components.common.registry.checks import Check

    real = module.run_checks
    module.run_checks = lambda *_, **__: [Check("content", "pass")]  # type: ignore[assignment]
    try:
        approve(account, LAYOUT, MODEL, version, APPROVER)  # type: ignore[arg-type]
    finally:
        module.run_checks = real


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions that share most objects: 4 is 1 with another note, 5 equals what 1 holds (all deduplicated)."""
    root = tmp_path_factory.mktemp("models")
    for version, note in (("1", "one"), ("2", "two"), ("3", "three"), ("4", "four"), ("5", "one"), ("6", "three")):
        write_model(root / version, note=note)
    return root


OPS = st.sampled_from(
    [Op("publish", v) for v in "456"]
    + [
        Op("promote", "3"),
        Op("promote", "1"),
        Op("rollback"),
        Op("retire", "1"),
        Op("retire", "3"),
        Op("collect"),
        Op("collect"),
    ]
)


def explore(models: Path, ops: list[Op], choices: list[int], crashes: set[int]) -> Scheduler:
    """Run `ops` interleaved as `choices` say; the calls numbered in `crashes` kill their caller. Checks all through."""
    blobs = prepared(models)
    scheduler = Scheduler(blobs)
    for op in ops:
        scheduler.start(op.run(models))
    step = 0
    while held := scheduler.settle():
        who = held[choices[step % len(choices)] % len(held)]
        scheduler.step(who, crash=step in crashes)
        step += 1
        assert step < 3000, "the operations never end"
    for result in scheduler.results.values():
        assert (
            result is None
            or isinstance(result, Crash)
            or (isinstance(result, DynamoBlobError) and result.code in EXPECTED)
        ), repr(result)
    finish(models, blobs, ops, scheduler)
    return scheduler


def finish(models: Path, blobs: Blobs, ops: list[Op], scheduler: Scheduler) -> None:
    """What died can be run again; a final collection leaves every visible release whole."""
    account = MemoryAccount(blobs)
    for i, op in enumerate(ops):
        if isinstance(scheduler.results[i], Crash):
            try:
                op.run(models)(account)
            except DynamoBlobError as e:
                assert e.code in EXPECTED, str(e)
            check_now(blobs)
        elif op.kind == "publish" and scheduler.results[i] is None:
            load(account, LAYOUT, MODEL, op.version)  # type: ignore[arg-type]
    blobs.clock += 1000
    collect(account, LAYOUT, dry_run=False, grace_s=0, abandoned_s=100, now=blobs.clock)  # type: ignore[arg-type]
    check_now(blobs)
    named = set()
    for name, blob in blobs.containers["weights"].items():
        if name.endswith("/manifest.json"):
            named |= {f.blob for f in Manifest.model_validate_json(blob.data).files}
    left = {n for n, b in blobs.containers["weights"].items() if n.startswith("objects/") and b.committed}
    assert left == named, "after a collection there is exactly what releases name"


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    derandomize=True,
)
@given(
    ops=st.lists(OPS, min_size=2, max_size=4),
    choices=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    crashes=st.sets(st.integers(0, 120), max_size=2),
)
def test_any_interleaving_with_crashes(models: Path, ops: list[Op], choices: list[int], crashes: set[int]) -> None:
    explore(models, ops, choices, crashes)


@pytest.mark.parametrize("kind", ["publish", "promote", "rollback", "retire", "collect"])
def test_a_crash_at_every_single_call(models: Path, kind: str) -> None:
    """One operation, killed at its first, second, third … call."""
    op = Op(kind, {"publish": "4", "promote": "3", "retire": "3"}.get(kind, ""))
    calls = explore(models, [op], [0], set()).calls
    assert calls > 3
    for n in range(calls):
        explore(models, [op], [0], {n})


def test_publish_against_collect_at_every_offset(models: Path) -> None:
    """A publish of content that is just being collected: each wholly between any two calls of the other."""
    for outer, inner in ((1, 0), (0, 1)):
        for offset in range(0, 60):
            blobs = prepared(models)
            retire(MemoryAccount(blobs), LAYOUT, MODEL, "3", APPROVER)  # type: ignore[arg-type]
            scheduler = Scheduler(blobs)
            scheduler.start(Op("publish", "6").run(models))  # the same content as the retired 3
            scheduler.start(Op("collect").run(models))
            step = 0
            while held := scheduler.settle():
                turn = outer if step < offset or inner not in held else inner
                scheduler.step(turn if turn in held else held[0])
                step += 1
            assert scheduler.results == {0: None, 1: None}, scheduler.results
            check_now(blobs)
            if offset >= step:
                break


def test_without_the_touch_an_object_is_lost(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a publisher that trusts what it sees, and this test sees a release lose its object."""
    monkeypatch.setattr(
        upload,
        "keep",
        lambda account, layout, digest, size: account.find(layout.container, layout.object(digest)) is not None,
    )
    with pytest.raises(AssertionError, match="is visible and lacks"):
        test_publish_against_collect_at_every_offset(models)


def test_with_the_signature_first_a_release_is_half_visible(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: commit before the objects are there."""
    import components.common.registry.publish as module

    real = module.upload

    def early(account: object, layout: Layout, files: object, *rest: object) -> None:
        manifest = Manifest.model_validate_json(account.get(layout.container, layout.manifest(MODEL, "4")))  # type: ignore[attr-defined]
        module.commit(account, layout, manifest, PUBLISHER)  # type: ignore[arg-type]
        real(account, layout, files, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "upload", early)
    with pytest.raises(AssertionError, match="is visible and lacks"):
        explore(models, [Op("publish", "4")], [0], set())


def test_two_promote_at_once_one_wins_the_other_is_told(models: Path) -> None:
    for order in ([0, 1], [1, 0], [0, 0, 1, 1], [1, 1, 1, 0, 0, 0]):
        scheduler = explore(models, [Op("promote", "3"), Op("promote", "1")], order, set())
        lost = [r for r in scheduler.results.values() if r is not None]
        assert len(lost) <= 1 and all(
            isinstance(r, DynamoBlobError) and r.code == "REGISTRY-CHANNEL-LOST" for r in lost
        )
        channel = read_channel(MemoryAccount(scheduler.blobs), LAYOUT, MODEL)  # type: ignore[arg-type]
        assert channel and channel.current in ("3", "1")
        if lost:
            assert channel.sequence == 3
