"""Approve, roll back, retire, collect, archive, artifacts: each rule once."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from components.common.errors import DynamoBlobError
from components.common.registry import artifacts, audit
from components.common.registry.approve import approve
from components.common.registry.archive import archive
from components.common.registry.config import ReleaseConfig, TrustConfig
from components.common.registry.listing import diff, list_releases
from components.common.registry.promote import promote, rollback
from components.common.registry.publish import publish_directory
from components.common.registry.release import load, resolve
from components.common.registry.retire import collect, retire
from components.common.registry.signing import SigningKey
from components.common.registry.verify import verify_content
from tests.registry_store import PROVENANCE, Registry, write_model

M = "m"


def publish(r: Registry, directory: Path, version: str, **facts: object) -> None:
    publish_directory(
        r.publisher, r.layout.container, directory, M, version, key=r.publisher_key, provenance=PROVENANCE | facts
    )


def approved(r: Registry, root: Path, *versions: str) -> None:
    for v in versions:
        publish(r, write_model(root / v, note=f"note {v}"), v)
        approve(r.approver, r.layout, M, v, r.approver_key)


def put_forward(r: Registry, *versions: str) -> None:
    for v in versions:
        promote(r.approver, r.layout, M, v, r.approver_key, r.trust)


def failed_checks(r: Registry, version: str, **options: object) -> dict[str, str]:
    with pytest.raises(DynamoBlobError) as caught:
        approve(r.approver, r.layout, M, version, r.approver_key, **options)  # type: ignore[arg-type]
    assert caught.value.code == "REGISTRY-CHECK-FAILED"
    assert r.root.find(r.layout.approvals, r.layout.approval(M, version)) is None
    return {c["name"]: c["detail"] for c in caught.value.data["checks"] if c["result"] == "fail"}


# -- the gate


def test_results_of_the_checks_are_signed_into_the_approval(registry: Registry, tmp_path: Path) -> None:
    approved(registry, tmp_path, "1")
    document = json.loads(registry.serving.get(registry.layout.approvals, registry.layout.approval(M, "1")))
    assert [(c["name"], c["result"]) for c in document["checks"]] == [
        ("content", "pass"), ("safetensors", "pass"), ("no-pickle", "pass"), ("no-remote-code", "pass"), ("provenance", "pass"),
    ]  # fmt: skip
    assert (
        document["key"] == registry.approver_key.public
        and document["manifest"] == load(registry.serving, registry.layout, M, "1").digest
    )


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("pytorch_model.bin", b"x", "can hold pickled code"),
        ("vocab.txt", pickle.dumps({"a": 1}), "begins like a pickle"),
        ("data.blob", bytes(range(1, 65)) + b"\xff\xfe", "unknown kind"),
    ],
)
def test_pickles_do_not_pass(registry: Registry, tmp_path: Path, name: str, content: bytes, why: str) -> None:
    directory = write_model(tmp_path / "m")
    (directory / name).write_bytes(content)
    publish(registry, directory, "1")
    assert why in failed_checks(registry, "1")["no-pickle"]


def test_code_passes_only_if_the_release_says_so_and_the_approver_allows_it(registry: Registry, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "modeling_x.py").write_text("print(1)")
    (directory / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_x.X"}}')
    publish(registry, directory, "quiet")
    publish(registry, directory, "open", remote_code=True)
    assert "does not say" in failed_checks(registry, "quiet", allow=("remote-code",))["no-remote-code"]
    assert "did not allow" in failed_checks(registry, "open")["no-remote-code"]
    done = approve(registry.approver, registry.layout, M, "open", registry.approver_key, allow=("remote-code",))
    assert [c.result for c in done.checks if c.name == "no-remote-code"] == ["allowed"] and done.document[
        "allowed"
    ] == ["remote-code"]


def test_missing_provenance_and_a_failing_scanner_do_not_pass(registry: Registry, tmp_path: Path) -> None:
    publish_directory(
        registry.publisher,
        registry.layout.container,
        write_model(tmp_path / "m"),
        M,
        "1",
        key=registry.publisher_key,
        provenance={"source": "x"},
    )
    failed = failed_checks(registry, "1", scanner="/bin/sh -c 'ls $0 | grep -q config.json && exit 3'")
    assert failed["provenance"].startswith("missing: license") and "exit 3" in failed["scanner"]


def test_damaged_content_does_not_pass(registry: Registry, tmp_path: Path) -> None:
    publish(registry, write_model(tmp_path / "m"), "1")
    file = next(
        f for f in load(registry.serving, registry.layout, M, "1").manifest.files if f.path == "model.safetensors"
    )
    data = bytearray(registry.root.get(registry.layout.container, file.blob))
    data[-1] ^= 1
    registry.root.put(registry.layout.container, file.blob, bytes(data))
    failed = failed_checks(registry, "1")
    assert "REGISTRY-OBJECT-CORRUPT" in failed["content"] and file.ranges[0] in failed["content"]


# -- channels


def test_rollback_goes_back_one_at_a_time(registry: Registry, tmp_path: Path) -> None:
    approved(registry, tmp_path, "1", "2", "3")
    put_forward(registry, "1", "2", "3")
    release = ReleaseConfig(model=M, container=registry.layout.container)
    for expected in ("2", "1"):
        assert rollback(registry.approver, registry.layout, M, registry.approver_key).current == expected
        assert resolve(registry.serving, release, registry.trust, record=False).manifest.version == expected
    with pytest.raises(DynamoBlobError, match="REGISTRY-CHANNEL-EMPTY"):
        rollback(registry.approver, registry.layout, M, registry.approver_key)


def test_a_rollback_to_what_serving_would_refuse_is_refused(registry: Registry, tmp_path: Path) -> None:
    """The approval of the previous version has expired: better told now than at the next start."""
    approved(registry, tmp_path, "1", "2")
    put_forward(registry, "1", "2")
    approve(registry.approver, registry.layout, M, "1", registry.approver_key, days=-1)
    with pytest.raises(DynamoBlobError, match="REGISTRY-APPROVAL-EXPIRED"):
        rollback(registry.approver, registry.layout, M, registry.approver_key, registry.trust)
    release = ReleaseConfig(model=M, container=registry.layout.container)
    assert resolve(registry.serving, release, registry.trust, record=False).manifest.version == "2"
    approve(registry.approver, registry.layout, M, "1", registry.approver_key)
    assert rollback(registry.approver, registry.layout, M, registry.approver_key, registry.trust).current == "1"


def test_promoting_what_is_current_changes_nothing(registry: Registry, tmp_path: Path) -> None:
    approved(registry, tmp_path, "1")
    put_forward(registry, "1")
    before = registry.root.head(registry.layout.approvals, registry.layout.channel(M)).etag
    put_forward(registry, "1")
    assert registry.root.head(registry.layout.approvals, registry.layout.channel(M)).etag == before


def test_a_key_that_serving_refuses_moves_no_channel(registry: Registry, tmp_path: Path) -> None:
    """Once `promote --key PUBLISHER` said it had worked, serving refused the channel, and promoting again mended nothing."""
    r, config = registry, ReleaseConfig(model=M, container=registry.layout.container)
    approved(r, tmp_path, "1", "2")
    put_forward(r, "1", "2")
    for key in (r.publisher_key, SigningKey.generate()):
        with pytest.raises(DynamoBlobError, match="REGISTRY-CHANNEL-UNKNOWN-KEY") as caught:
            promote(r.approver, r.layout, M, "1", key, r.trust)
        assert key.public[:16] in caught.value.why and caught.value.where and caught.value.do
        with pytest.raises(DynamoBlobError, match="REGISTRY-CHANNEL-UNKNOWN-KEY"):
            rollback(r.approver, r.layout, M, key, r.trust)
        with pytest.raises(DynamoBlobError, match=r"REGISTRY-APPROVAL-(UNKNOWN-KEY|SELF)"):
            approve(r.approver, r.layout, M, "2", key, approver_keys=r.trust.approver_keys)
    assert resolve(r.serving, config, r.trust, record=False).manifest.version == "2", "nothing was done"
    rollback(r.approver, r.layout, M, SigningKey.generate())  # without keys at hand it works, and is not served
    with pytest.raises(DynamoBlobError, match="REGISTRY-CHANNEL-UNKNOWN-KEY"):
        resolve(r.serving, config, r.trust, record=False)
    put_forward(r, "1")
    assert resolve(r.serving, config, r.trust, record=False).manifest.version == "1", "promoting signs it anew"


def test_unapproved_is_not_promoted(registry: Registry, tmp_path: Path) -> None:
    publish(registry, write_model(tmp_path / "m"), "1")
    with pytest.raises(DynamoBlobError, match="REGISTRY-UNAPPROVED"):
        put_forward(registry, "1")


# -- retire and collect


def test_retire_refuses_what_a_channel_points_at(registry: Registry, tmp_path: Path) -> None:
    approved(registry, tmp_path, "1", "2", "3")
    put_forward(registry, "1", "2", "3")
    for version, which in (("3", "current"), ("2", "previous")):
        with pytest.raises(DynamoBlobError) as caught:
            retire(registry.collector, registry.layout, M, version, registry.approver_key)
        assert caught.value.code == "REGISTRY-VERSION-IN-USE" and which in caught.value.what
    retire(registry.collector, registry.layout, M, "1", registry.approver_key)
    with pytest.raises(DynamoBlobError, match="REGISTRY-VERSION-RETIRED"):
        resolve(
            registry.serving, ReleaseConfig(model=M, version="1", container=registry.layout.container), registry.trust
        )
    with pytest.raises(DynamoBlobError, match="REGISTRY-VERSION-RETIRED"):
        publish(registry, write_model(tmp_path / "again", note="note 1"), "1")
    assert rollback(registry.approver, registry.layout, M, registry.approver_key).current == "2"
    with pytest.raises(DynamoBlobError, match="REGISTRY-CHANNEL-EMPTY"):
        rollback(registry.approver, registry.layout, M, registry.approver_key)


def test_collect_dry_run_grace_and_shared_objects(registry: Registry, tmp_path: Path) -> None:
    approved(registry, tmp_path, "1", "2")
    put_forward(registry, "2")
    note = load(registry.serving, registry.layout, M, "1").manifest
    own = [f.blob for f in note.files if f.path == "note.txt"]
    retire(registry.collector, registry.layout, M, "1", registry.approver_key)
    assert collect(registry.collector, registry.layout, dry_run=False).young == 1, (
        "within the grace period nothing goes"
    )
    assert collect(registry.collector, registry.layout, grace_s=-10).objects == own
    assert registry.root.find(registry.layout.container, own[0]), "a dry run deletes nothing"
    done = collect(registry.collector, registry.layout, dry_run=False, grace_s=-10)
    assert done.objects == own and not registry.root.find(registry.layout.container, own[0])
    found = resolve(
        registry.serving, ReleaseConfig(model=M, container=registry.layout.container), registry.trust, record=False
    )
    assert verify_content(registry.serving, registry.layout, found.manifest).problems == []


def test_nothing_is_collected_while_a_manifest_cannot_be_read(registry: Registry, tmp_path: Path) -> None:
    publish(registry, write_model(tmp_path / "m"), "1")
    registry.root.put(registry.layout.container, registry.layout.manifest(M, "1"), b"{}")
    with pytest.raises(DynamoBlobError, match="REGISTRY-COLLECT-UNSAFE"):
        collect(registry.collector, registry.layout, dry_run=False, grace_s=-10)


def test_an_abandoned_publish_is_given_up_and_its_publisher_told(registry: Registry, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    account = registry.store.account("publisher", container=registry.layout.container)

    def die(call: str) -> None:
        if "append" in call:
            raise KeyboardInterrupt

    account.hook = die
    with pytest.raises(KeyboardInterrupt):
        publish_directory(account, registry.layout.container, directory, M, "1", key=registry.publisher_key)
    assert [r["state"] for r in list_releases(registry.serving, registry.layout)] == ["incomplete"]
    assert collect(registry.collector, registry.layout, dry_run=False, grace_s=-10).objects == [], "it may still go on"
    done = collect(registry.collector, registry.layout, dry_run=False, grace_s=-10, abandoned_s=-10)
    assert done.abandoned == ["m 1"] and len(done.objects) == 3
    with pytest.raises(DynamoBlobError, match="REGISTRY-VERSION-RETIRED"):
        publish_directory(registry.publisher, registry.layout.container, directory, M, "1", key=registry.publisher_key)


# -- archive, artifacts, listing


def test_an_archive_is_proven_by_the_same_keys(registry: Registry, tmp_path: Path) -> None:
    approved(registry, tmp_path, "1")
    cool = registry.store.account(name="cool")
    done = archive(registry.publisher, registry.layout, M, "1", cool, key=registry.publisher_key)
    stored = load(cool, registry.layout, M, "1")
    assert stored.digest == load(registry.serving, registry.layout, M, "1").digest and done.copied > 0
    assert verify_content(cool, registry.layout, stored.manifest).problems == []
    assert {cool.head(registry.layout.container, f.blob).tier for f in stored.manifest.files} == {"Cool"}
    there = ReleaseConfig(model=M, version="1", container=registry.layout.container)
    found = resolve(cool, there, registry.trust, record=False)
    assert found.digest == stored.digest and found.approver == registry.approver_key.public
    approve(registry.approver, registry.layout, M, "1", registry.approver_key)  # again: the first one no longer counts
    assert archive(registry.publisher, registry.layout, M, "1", cool).copied == 0
    assert resolve(cool, there, registry.trust, record=False).approved_at >= found.approved_at
    assert audit.read(registry.serving, registry.layout, M)[-1].action == "archive"
    cool.put(registry.layout.audit, registry.layout.audit_log(M, 1), b"something else\n")
    with pytest.raises(DynamoBlobError, match="REGISTRY-ARCHIVE-DIFFERS"):
        archive(registry.publisher, registry.layout, M, "1", cool)


SELECTOR = {"engine": "vllm 0.31.0", "torch": "2.13.0", "gpu_arch": "sm_90", "config_digest": "abc"}


def test_artifacts_fit_exactly_or_not_at_all(registry: Registry, tmp_path: Path) -> None:
    approved(registry, tmp_path, "1")
    r, stored = registry, load(registry.serving, registry.layout, M, "1")
    cache = tmp_path / "cache"
    (cache / "inductor").mkdir(parents=True)
    (cache / "inductor" / "kernel.so").write_bytes(b"\x7fELF code")

    def find(selector: dict[str, str] = SELECTOR, trust: TrustConfig = r.trust) -> artifacts.Artifacts:
        return artifacts.find(r.serving, r.layout, stored, selector, trust)

    assert find().reason.startswith("REGISTRY-ARTIFACT-MISSING")
    artifacts.attach(r.publisher, r.layout, stored, cache, SELECTOR, r.publisher_key)
    assert find().reason.startswith("REGISTRY-ARTIFACT-UNAPPROVED") and find().files == ()
    with pytest.raises(DynamoBlobError, match="REGISTRY-APPROVAL-SELF"):
        artifacts.approve_artifacts(r.approver, r.layout, stored, SELECTOR, r.publisher_key)
    artifacts.approve_artifacts(r.approver, r.layout, stored, SELECTOR, r.approver_key)
    found = find()
    assert found.reason == "" and [f.path for f in found.files] == ["inductor/kernel.so"]
    found.fetch(r.serving, r.layout, tmp_path / "out")
    assert (tmp_path / "out" / "inductor" / "kernel.so").read_bytes() == b"\x7fELF code"
    assert (
        find(SELECTOR | {"gpu_arch": "sm_100"}).reason
        == "REGISTRY-ARTIFACT-MISMATCH: gpu_arch sm_90 there, sm_100 here"
    )
    stranger = TrustConfig(publisher_keys=(SigningKey.generate().public,), approver_keys=r.trust.approver_keys)
    assert find(trust=stranger).reason.startswith("REGISTRY-ARTIFACT-UNKNOWN-KEY")
    assert collect(r.collector, r.layout, dry_run=True, grace_s=-10).objects == [], "artifacts keep their objects"
    r.root.put(r.layout.container, found.files[0].blob, b"\x7fELF evil")
    with pytest.raises(DynamoBlobError, match="REGISTRY-OBJECT-CORRUPT"):
        found.fetch(r.serving, r.layout, tmp_path / "out2")
    assert not list((tmp_path / "out2").rglob("*.so"))
    with pytest.raises(DynamoBlobError, match="REGISTRY-ARTIFACT-SELECTOR"):
        find({"engine": "x"})


def test_list_and_diff(registry: Registry, tmp_path: Path) -> None:
    approved(registry, tmp_path, "1", "2")
    publish(registry, write_model(tmp_path / "3", floats=128), "3")
    put_forward(registry, "1", "2")
    rows = {r["version"]: (r["state"], r["channel"]) for r in list_releases(registry.serving, registry.layout, M)}
    assert rows == {"1": ("approved", "previous"), "2": ("approved", "current"), "3": ("published", "")}
    assert list_releases(registry.serving, registry.layout, "other") == []
    d = diff(registry.serving, registry.layout, M, "2", "3")
    assert (
        d["removed"] == ["note.txt"] and d["changed"] == ["model.safetensors"] and d["tensors_reshaped"] == ["a", "b"]
    )
    assert d["new_bytes"] == (tmp_path / "3" / "model.safetensors").stat().st_size


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = SigningKey.generate()
    key.write(tmp_path / "k.pem")
    assert (
        SigningKey.open(tmp_path / "k.pem").public == key.public
        and (tmp_path / "k.pem").stat().st_mode & 0o777 == 0o600
    )
    with pytest.raises(DynamoBlobError, match="exists"):
        key.write(tmp_path / "k.pem")
    monkeypatch.setenv("K", (tmp_path / "k.pem").read_text())
    assert SigningKey.open(env="K").public == key.public
    monkeypatch.setenv("K", "00" * 32)
    assert len(SigningKey.open(env="K").public) == 64
    for bad in ("", "nonsense", "00" * 31):
        monkeypatch.setenv("K", bad)
        with pytest.raises(DynamoBlobError, match="REGISTRY-KEY"):
            SigningKey.open(env="K")
