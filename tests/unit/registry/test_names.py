"""Odd names: what can be served later can be published, the rest is refused before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from components.common.errors import DynamoBlobError
from components.common.registry import artifacts
from components.common.registry.layout import check_paths
from components.common.registry.publish import publish_directory
from components.common.registry.release import load
from components.common.registry.retire import collect, retire
from components.common.registry.verify import verify_content
from tests.registry_store import PROVENANCE, Registry, write_model

SELECTOR = {"engine": "vllm-1", "torch": "2", "gpu_arch": "sm_90", "config_digest": "a"}


def publish(r: Registry, directory: Path, model: str = "m", version: str = "1") -> None:
    publish_directory(
        r.publisher, r.layout.container, directory, model, version, key=r.publisher_key, provenance=PROVENANCE
    )


def test_unusual_names_are_served_as_they_are(registry: Registry, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    names = [
        "Größe – 模型.txt",
        "with space.txt",
        "README",
        "readme",
        "100%?#&+.txt",
        "..almost",
        "x" * 250,
        "~t/a'b\".txt",
    ]
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(name)
    publish(registry, directory)
    manifest = load(registry.serving, registry.layout, "m", "1").manifest
    assert {f.path for f in manifest.files} >= set(names) - {"..almost"}, "hidden names are left out, and only they"
    assert verify_content(registry.serving, registry.layout, manifest).problems == []


@pytest.mark.parametrize("name", [b"a\\b", b"new\nline", b"\xff\xfe.txt", b"bell\x07", "rtl\u202etxt".encode()])
def test_names_a_manifest_cannot_hold_are_refused_before_anything_is_written(
    name: bytes, registry: Registry, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "m")
    Path(os.fsdecode(os.fsencode(directory) + b"/" + name)).write_text("x")
    with pytest.raises(DynamoBlobError) as caught:
        publish(registry, directory)
    assert caught.value.code == "REGISTRY-NAME" and ("printed" in caught.value.why or "leaves" in caught.value.why)
    str(caught.value).encode()  # the message itself can be printed
    assert list(registry.root.list(registry.layout.container)) == []


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        (["a/../b"], "leaves"), (["/a"], "leaves"), (["a//b"], "leaves"), (["./a"], "leaves"), (["a/b", "a"], "is a file and the directory"),
        (["a/" + "x" * 256], "too long"), (["é" * 128], "too long"),
    ],
)  # fmt: skip
def test_paths_that_cannot_lie_in_one_directory(paths: list[str], why: str) -> None:
    with pytest.raises(DynamoBlobError) as caught:
        check_paths(paths, "az://c/p")
    assert caught.value.code == "REGISTRY-NAME" and why in caught.value.why
    check_paths(["a/b", "a.b", "ab"], "")


@pytest.mark.parametrize("kind", ["dangling", "directory", "pipe"])
def test_nothing_is_left_out_in_silence(kind: str, registry: Registry, tmp_path: Path) -> None:
    """An unfinished download has links that point nowhere; leaving them out would publish half a model."""
    directory = write_model(tmp_path / "m")
    (directory / "linked.json").symlink_to(write_model(tmp_path / "blobs") / "config.json")
    publish(registry, directory)
    assert "linked.json" in {f.path for f in load(registry.serving, registry.layout, "m", "1").manifest.files}
    if kind == "pipe":
        os.mkfifo(directory / "odd")
    else:
        (directory / "odd").symlink_to(tmp_path / ("nowhere" if kind == "dangling" else "blobs"))
    with pytest.raises(DynamoBlobError, match="REGISTRY-SOURCE"):
        publish(registry, directory, version="2")


def test_version_b_of_model_a_is_not_model_a_slash_b(registry: Registry, tmp_path: Path) -> None:
    """Both have their artifacts under artifacts/a/b/: retiring one must not touch the other's."""
    r = registry
    directory, cache = write_model(tmp_path / "m"), tmp_path / "cache"
    cache.mkdir()
    (cache / "kernel.so").write_bytes(b"\x7fELF")
    for model, version in (("a", "b"), ("a/b", "1")):
        publish(r, directory, model, version)
    stored = load(r.serving, r.layout, "a/b", "1")
    artifacts.attach(r.publisher, r.layout, stored, cache, SELECTOR, r.publisher_key)
    artifacts.approve_artifacts(r.approver, r.layout, stored, SELECTOR, r.approver_key)
    other = load(r.serving, r.layout, "a", "b")
    assert artifacts.find(r.serving, r.layout, other, SELECTOR, r.trust).reason.startswith("REGISTRY-ARTIFACT-MISSING")
    retire(r.collector, r.layout, "a", "b", r.approver_key)
    collect(r.collector, r.layout, dry_run=False, grace_s=-10)
    found = artifacts.find(r.serving, r.layout, stored, SELECTOR, r.trust)
    assert [f.path for f in found.files] == ["kernel.so"], found.reason
    found.fetch(r.serving, r.layout, tmp_path / "out")


def test_artifacts_that_are_not_all_there_are_not_approved(registry: Registry, tmp_path: Path) -> None:
    r, cache = registry, tmp_path / "cache"
    cache.mkdir()
    (cache / "kernel.so").write_bytes(b"\x7fELF")
    publish(r, write_model(tmp_path / "m"))
    stored = load(r.serving, r.layout, "m", "1")
    account = r.store.account("publisher", container=r.layout.container)

    def die(call: str) -> None:
        if "objects/" in call:
            raise KeyboardInterrupt

    account.hook = die
    with pytest.raises(KeyboardInterrupt):
        artifacts.attach(account, r.layout, stored, cache, SELECTOR, r.publisher_key)
    with pytest.raises(DynamoBlobError, match="REGISTRY-OBJECT-MISSING"):
        artifacts.approve_artifacts(r.approver, r.layout, stored, SELECTOR, r.approver_key)
    artifacts.attach(r.publisher, r.layout, stored, cache, SELECTOR, r.publisher_key)
    artifacts.approve_artifacts(r.approver, r.layout, stored, SELECTOR, r.approver_key)
    assert artifacts.find(r.serving, r.layout, stored, SELECTOR, r.trust).files
    both = r.trust.model_copy(update={"approver_keys": (*r.trust.approver_keys, r.publisher_key.public)})
    forged = r.publisher_key.sign(
        {"format": artifacts.APPROVAL_FORMAT, "artifacts": "", "approved_at": "2026-01-01T00:00:00Z"}
    )
    r.root.put(r.layout.approvals, f"approvals/m/1.artifacts/{artifacts.selector_digest(SELECTOR)}.json", forged)
    reason = artifacts.find(r.serving, r.layout, stored, SELECTOR, both).reason
    assert reason.startswith("REGISTRY-ARTIFACT-APPROVAL-SELF"), "a key on both lists still is one person"
