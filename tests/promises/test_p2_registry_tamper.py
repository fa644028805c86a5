"""P2: any single-byte change, removal, exchange or replay of any stored object of a release is refused before
anything is served, each kind of object by codes of its own.

`prove` is what a start does: resolve under full trust, then every byte of every object against the manifest.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.common.errors import DynamoBlobError
from components.common.registry.approve import approve
from components.common.registry.checks import Check
from components.common.registry.config import ReleaseConfig, TrustConfig
from components.common.registry.layout import Layout
from components.common.registry.promote import promote
from components.common.registry.publish import publish_directory
from components.common.registry.release import Resolved, resolve
from components.common.registry.signing import SigningKey
from components.common.registry.verify import ProvenReader, verify_content
from tests.memory_account import Blob, Blobs, MemoryAccount
from tests.registry_store import PROVENANCE, new_registry, write_model

LAYOUT, MODEL, OTHER = Layout("weights"), "m", "n"
PUBLISHER, APPROVER = SigningKey.generate(), SigningKey.generate()
TRUST = TrustConfig(require="approval", publisher_keys=(PUBLISHER.public,), approver_keys=(APPROVER.public,))
KINDS = {
    "manifest": ("weights", f"releases/{MODEL}/2/manifest.json", {"REGISTRY-MANIFEST-MISMATCH", "REGISTRY-MANIFEST-CORRUPT", "REGISTRY-RELEASE-MISSING"}),
    "signature": ("weights", f"releases/{MODEL}/2/manifest.sig", {"REGISTRY-SIGNATURE-", "REGISTRY-RELEASE-INCOMPLETE"}),
    "approval": ("weights-approvals", f"approvals/{MODEL}/2.json", {"REGISTRY-APPROVAL-", "REGISTRY-UNAPPROVED"}),
    "channel": ("weights-approvals", f"channels/{MODEL}.json", {"REGISTRY-CHANNEL-"}),
    "audit": ("weights-audit", f"audit/{MODEL}/000001.log", {"REGISTRY-AUDIT-"}),
    "object": ("weights", "objects/", {"REGISTRY-OBJECT-"}),
}  # fmt: skip


def _approve(account: object, model: str, version: str) -> None:
    import components.common.registry.approve as module

    real = module.run_checks
    module.run_checks = lambda *_, **__: [Check("content", "pass")]  # type: ignore[assignment]
    try:
        approve(account, LAYOUT, model, version, APPROVER)  # type: ignore[arg-type]
    finally:
        module.run_checks = real


@functools.cache
def history(root: Path) -> tuple[Blobs, ...]:
    """The store after each step of two models' lives; the last is what is served: version 2 of `m`."""
    blobs = Blobs({c: {} for c in LAYOUT.containers})
    account: object = MemoryAccount(blobs)
    states = []
    for model, version in ((OTHER, "1"), (MODEL, "1"), (MODEL, "2")):
        directory = write_model(root / model / version, note=f"{model} {version}")
        publish_directory(account, "weights", directory, model, version, key=PUBLISHER, provenance=PROVENANCE)  # type: ignore[arg-type]
        states.append(blobs.copy())
        _approve(account, model, version)
        states.append(blobs.copy())
        promote(account, LAYOUT, model, version, APPROVER, TRUST)  # type: ignore[arg-type]
        states.append(blobs.copy())
    _approve(account, MODEL, "2")  # approved again: the first approval is now an old one
    return (*states, blobs)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("history")


def prove(blobs: Blobs) -> Resolved:
    account: object = MemoryAccount(blobs)
    found = resolve(account, ReleaseConfig(model=MODEL), TRUST, record=False)  # type: ignore[arg-type]
    for file in found.manifest.files:
        ProvenReader(account, LAYOUT, found.manifest, file).read(0, max(1, file.size))  # type: ignore[arg-type]
        assert account.head(*LAYOUT.place(file)).size == file.size  # type: ignore[attr-defined]
    return found


def target(kind: str, blobs: Blobs) -> tuple[dict[str, Blob], str]:
    """Container and name of the object of this kind that the served release uses (for objects: the safetensors file)."""
    container, name, _ = KINDS[kind]
    if kind == "object":
        manifest = resolve(MemoryAccount(blobs), ReleaseConfig(model=MODEL), TRUST, record=False).manifest  # type: ignore[arg-type]
        name = next(f.blob for f in manifest.files if f.path == "model.safetensors")
    return blobs.containers[container], name


def refused(kind: str, blobs: Blobs) -> str:
    with pytest.raises(DynamoBlobError) as caught:
        prove(blobs)
    code = caught.value.code
    assert any(code == own or (own.endswith("-") and code.startswith(own)) for own in KINDS[kind][2]), (
        f"{kind}: {caught.value}"
    )
    assert caught.value.where and caught.value.do
    return code


def change(kind: str, root: Path, how: Callable[[dict[str, Blob], str], None]) -> str:
    blobs = history(root)[-1].copy()
    box, name = target(kind, blobs)
    how(box, name)
    return refused(kind, blobs)


def flip(box: dict[str, Blob], name: str, at: int, mask: int) -> None:
    data = bytearray(box[name].data)
    data[at % len(data)] ^= mask
    box[name].data = bytes(data)


def test_untouched_it_is_proven(root: Path) -> None:
    found = prove(history(root)[-1].copy())
    assert found.manifest.version == "2" and found.approver == APPROVER.public and found.publisher == PUBLISHER.public


@pytest.mark.parametrize("kind", ["signature", "approval", "channel"])
def test_every_byte(kind: str, root: Path) -> None:
    """Each byte of the small documents in turn, by a random other value."""
    rng = random.Random(7)
    _, name = target(kind, blobs := history(root)[-1])
    size = len(blobs.containers[KINDS[kind][0]][name].data)
    for at in range(size):
        change(kind, root, lambda box, n, at=at: flip(box, n, at, rng.randrange(1, 256)))  # type: ignore[misc]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(kind=st.sampled_from(["manifest", "audit", "object"]), at=st.integers(0, 20_000), mask=st.integers(1, 255))
def test_any_byte(kind: str, at: int, mask: int, root: Path) -> None:
    change(kind, root, lambda box, name: flip(box, name, at, mask))


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    kind=st.sampled_from(sorted(KINDS)), at=st.integers(0, 20_000), piece=st.binary(max_size=3), cut=st.integers(0, 3)
)
def test_any_small_edit(kind: str, at: int, piece: bytes, cut: int, root: Path) -> None:
    """Bytes inserted, left out or replaced anywhere, the ends included."""

    def edit(box: dict[str, Blob], name: str) -> None:
        data = box[name].data
        where = at % (len(data) + 1)
        edited = data[:where] + piece + data[where + cut :]
        box[name].data = edited if edited != data else data + b"x"

    blobs = history(root)[-1].copy()
    box, name = target(kind, blobs)
    edit(box, name)
    if kind == "object":
        try:
            prove(blobs)
        except (AssertionError, DynamoBlobError):  # a longer object is refused by its size
            return
        pytest.fail("an edited object was served")
    refused(kind, blobs)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_removal(kind: str, root: Path) -> None:
    code = change(kind, root, lambda box, name: box.pop(name) and None)
    expected = {
        "manifest": "REGISTRY-RELEASE-MISSING", "signature": "REGISTRY-RELEASE-INCOMPLETE", "approval": "REGISTRY-UNAPPROVED",
        "channel": "REGISTRY-CHANNEL-MISSING", "audit": "REGISTRY-AUDIT-MISSING", "object": "REGISTRY-OBJECT-MISSING",
    }  # fmt: skip
    assert code == expected[kind]


@pytest.mark.parametrize(
    ("kind", "other", "code"),
    [
        ("manifest", f"releases/{MODEL}/1/manifest.json", "REGISTRY-MANIFEST-MISMATCH"),
        ("manifest", f"releases/{OTHER}/1/manifest.json", "REGISTRY-MANIFEST-MISMATCH"),
        ("signature", f"releases/{MODEL}/1/manifest.sig", "REGISTRY-SIGNATURE-MISMATCH"),
        ("approval", f"approvals/{MODEL}/1.json", "REGISTRY-APPROVAL-MISMATCH"),
        ("approval", f"approvals/{OTHER}/1.json", "REGISTRY-APPROVAL-MISMATCH"),
        ("approval", f"channels/{MODEL}.json", "REGISTRY-APPROVAL-CORRUPT"),
        ("channel", f"channels/{OTHER}.json", "REGISTRY-CHANNEL-MISMATCH"),
        ("channel", f"approvals/{MODEL}/2.json", "REGISTRY-CHANNEL-CORRUPT"),
        ("audit", f"audit/{OTHER}/000001.log", "REGISTRY-AUDIT-TAMPERED"),
    ],
)
def test_exchange_with_a_valid_one(kind: str, other: str, code: str, root: Path) -> None:
    """Validly signed documents of another release, model or kind in its place."""
    assert change(kind, root, lambda box, name: box.__setitem__(name, box[other])) == code


def test_exchange_of_two_objects(root: Path) -> None:
    def swap(box: dict[str, Blob], name: str) -> None:
        other = next(n for n in box if n.startswith("objects/") and n != name and len(box[n].data) > 10)
        box[name], box[other] = box[other], box[name]

    assert change("object", root, swap) == "REGISTRY-OBJECT-CORRUPT"


def test_exchange_of_manifest_and_signature_for_those_of_another_version(root: Path) -> None:
    """A whole, validly signed older release under the newer name: the signature names its version."""

    def both(box: dict[str, Blob], name: str) -> None:
        for part in ("manifest.json", "manifest.sig"):
            box[f"releases/{MODEL}/2/{part}"] = box[f"releases/{MODEL}/1/{part}"]

    assert change("signature", root, both) == "REGISTRY-SIGNATURE-MISMATCH"


def test_replay_of_every_older_state_of_every_document(root: Path) -> None:
    """Each document, put back as it was after each earlier step, while the others are of now."""
    states, replayed = history(root), []
    for kind in ("approval", "channel", "audit"):
        container, name, _ = KINDS[kind]
        for older in states[:-1]:
            blobs = states[-1].copy()
            was, now = older.containers[container].get(name), blobs.containers[container][name]
            if was is None or was.data == now.data:
                continue
            blobs.containers[container][name] = was
            replayed.append((kind, refused(kind, blobs)))
    assert ("approval", "REGISTRY-APPROVAL-REPLAYED") in replayed
    assert ("channel", "REGISTRY-CHANNEL-REPLAYED") in replayed
    assert ("audit", "REGISTRY-AUDIT-UNRECORDED") in replayed and len(replayed) >= 6


def test_channel_and_audit_replayed_together_need_a_pin(root: Path) -> None:
    """A consistent older state of everything cannot be told from the past itself: that is what `manifest_digest` in the graph is for."""
    states = history(root)
    older = states[5]  # version 1 of m is current
    pinned = prove(states[-1].copy()).digest
    account: object = MemoryAccount(older.copy())
    assert resolve(account, ReleaseConfig(model=MODEL), TRUST, record=False).manifest.version == "1"  # type: ignore[arg-type]
    with pytest.raises(DynamoBlobError, match="REGISTRY-MANIFEST-PINNED"):
        resolve(account, ReleaseConfig(model=MODEL, manifest_digest=pinned), TRUST, record=False)  # type: ignore[arg-type]


def test_on_the_store_itself(tmp_path: Path) -> None:
    """The same through Azurite and the verifying reader: one flipped byte per kind, put back after each."""
    registry = new_registry()
    box = registry.layout
    directory = write_model(tmp_path / "m", floats=4096)
    publish_directory(
        registry.publisher, box.container, directory, MODEL, "1", key=registry.publisher_key, provenance=PROVENANCE
    )
    approve(registry.approver, box, MODEL, "1", registry.approver_key)
    promote(registry.approver, box, MODEL, "1", registry.approver_key, registry.trust)
    release = ReleaseConfig(model=MODEL, container=box.container)

    def start() -> Resolved:
        found = resolve(registry.serving, release, registry.trust, record=False)
        verify_content(registry.serving, box, found.manifest).raise_first()
        return found

    manifest = start().manifest
    objects = [("object", *box.place(f)) for f in manifest.files]
    documents = [
        ("manifest", box.container, box.manifest(MODEL, "1")),
        ("signature", box.container, box.signature(MODEL, "1")),
    ]
    documents += [("approval", box.approvals, box.approval(MODEL, "1")), ("channel", box.approvals, box.channel(MODEL))]
    for kind, container, name in documents + objects:
        good = registry.root.get(container, name)
        bad = bytearray(good)
        bad[len(bad) // 2] ^= 1
        registry.root.put(container, name, bytes(bad))
        with pytest.raises(DynamoBlobError) as caught:
            start()
        assert any(caught.value.code.startswith(own) for own in KINDS[kind][2]), f"{kind}: {caught.value}"
        registry.root.put(container, name, good + b"x")
        with pytest.raises(DynamoBlobError):
            start()
        registry.root.put(container, name, good)
    start()
