"""P2: least rights. Each identity can do its own work, and the store itself refuses (403) everybody else's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.common.errors import DynamoBlobError
from components.common.registry import audit
from components.common.registry.approve import approve
from components.common.registry.config import ReleaseConfig, TrustConfig
from components.common.registry.promote import promote, rollback
from components.common.registry.publish import publish_directory
from components.common.registry.release import resolve
from components.common.registry.retire import collect, retire
from components.common.registry.signing import SigningKey
from tests.registry_store import PROVENANCE, Registry, new_registry, write_model

MODEL = "m"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    r = new_registry()
    root = tmp_path_factory.mktemp("models")
    for version in "123":
        publish(r, write_model(root / version, note=version), version)
    for version in "12":
        approve(r.approver, r.layout, MODEL, version, r.approver_key)
        promote(r.approver, r.layout, MODEL, version, r.approver_key, r.trust)
    yield r


def publish(r: Registry, directory: Path, version: str, key: SigningKey | None = None) -> None:
    publish_directory(
        r.publisher, r.layout.container, directory, MODEL, version, key=key or r.publisher_key, provenance=PROVENANCE
    )


def forbidden(call: Callable[[], object]) -> None:
    with pytest.raises(DynamoBlobError) as caught:
        call()
    assert caught.value.code == "STORAGE-FORBIDDEN" and caught.value.data["status"] == 403, str(caught.value)


def test_serving_reads_everything_and_writes_nothing(registry: Registry) -> None:
    c, s = registry.layout.container, registry.serving
    found = resolve(s, ReleaseConfig(model=MODEL, container=c), registry.trust)
    assert found.manifest.version == "2" and found.audited
    forbidden(lambda: s.create(c, "objects/x", b"x"))
    forbidden(lambda: s.stage(c, "objects/x", "MDA=", b"x"))
    forbidden(lambda: s.put(c, registry.layout.manifest(MODEL, "2"), b"{}"))
    forbidden(lambda: s.delete(c, registry.layout.manifest(MODEL, "2")))
    forbidden(lambda: s.put(registry.layout.approvals, registry.layout.channel(MODEL), b"{}"))
    forbidden(lambda: s.put(registry.layout.audit, registry.layout.audit_log(MODEL, 1), b""))
    forbidden(lambda: s.delete(registry.layout.audit, registry.layout.audit_log(MODEL, 1)))
    assert audit.read(s, registry.layout, MODEL)[-1].action == "read"


def test_publisher_cannot_approve_or_promote_even_with_a_key(registry: Registry) -> None:
    forbidden(lambda: approve(registry.publisher, registry.layout, MODEL, "3", SigningKey.generate()))
    forbidden(lambda: promote(registry.publisher, registry.layout, MODEL, "1", registry.approver_key, registry.trust))
    forbidden(lambda: rollback(registry.publisher, registry.layout, MODEL, registry.approver_key))
    forbidden(lambda: registry.publisher.delete(registry.layout.container, registry.layout.manifest(MODEL, "1")))
    assert (
        resolve(
            registry.serving, ReleaseConfig(model=MODEL, container=registry.layout.container), registry.trust
        ).manifest.version
        == "2"
    )


def test_approver_cannot_change_content(registry: Registry, tmp_path: Path) -> None:
    c = registry.layout.container
    directory = write_model(tmp_path / "m", note="by the approver")
    forbidden(lambda: publish_directory(registry.approver, c, directory, MODEL, "9", key=registry.approver_key))
    forbidden(lambda: registry.approver.put(c, registry.layout.manifest(MODEL, "2"), b"{}"))
    forbidden(lambda: registry.approver.delete(c, registry.layout.manifest(MODEL, "2")))
    forbidden(lambda: retire(registry.approver, registry.layout, MODEL, "3", registry.approver_key))


def test_nobody_but_the_collector_deletes(registry: Registry) -> None:
    name = registry.layout.object("ab" * 32)
    registry.publisher.create(registry.layout.container, name, b"orphan")
    for account in (registry.serving, registry.publisher, registry.approver):
        forbidden(lambda account=account: account.delete(registry.layout.container, name))  # type: ignore[misc]
    done = collect(registry.collector, registry.layout, dry_run=False, grace_s=-10)
    assert done.objects == [name]


def test_one_registry_cannot_be_written_with_anothers_token(registry: Registry) -> None:
    other = new_registry()
    forbidden(lambda: registry.publisher.create(other.layout.container, "objects/x", b"x"))


# -- whose signature counts


def code(r: Registry, trust: TrustConfig, version: str = "", **release: str) -> str:
    with pytest.raises(DynamoBlobError) as caught:
        resolve(
            r.serving,
            ReleaseConfig(model=MODEL, version=version, container=r.layout.container, **release),
            trust,
            record=False,
        )
    assert caught.value.where and caught.value.do
    return caught.value.code


def test_each_refusal_has_its_own_code(registry: Registry, tmp_path: Path) -> None:
    t, stranger = registry.trust, SigningKey.generate()
    publish_directory(
        registry.publisher, registry.layout.container, write_model(tmp_path / "u", note="u"), MODEL, "unsigned"
    )
    publish(registry, write_model(tmp_path / "s", note="s"), "stranger", stranger)
    publish(registry, write_model(tmp_path / "e", note="e"), "expired")
    approve(registry.approver, registry.layout, MODEL, "expired", registry.approver_key, days=1e-9)
    publish(registry, write_model(tmp_path / "o", note="o"), "other-approver")
    approve(registry.approver, registry.layout, MODEL, "other-approver", stranger)
    time.sleep(1.1)  # the approval of "expired" ends at its own second
    codes = {
        "missing": code(registry, t, "nope"),
        "unsigned": code(registry, t, "unsigned"),
        "unknown publisher": code(registry, t, "stranger"),
        "unapproved": code(registry, t, "3"),
        "expired": code(registry, t, "expired"),
        "unknown approver": code(registry, t, "other-approver"),
        "self-approved": code(
            registry, t.model_copy(update={"publisher_keys": t.approver_keys, "approver_keys": t.approver_keys}), "2"
        ),
        "pinned": code(registry, t, "2", manifest_digest="0" * 64),
        "channel by an unknown key": code(registry, t.model_copy(update={"approver_keys": (stranger.public,)})),
        "no previous": code(registry, t, channel="nightly"),
    }
    assert codes == {
        "missing": "REGISTRY-RELEASE-MISSING",
        "unsigned": "REGISTRY-SIGNATURE-UNSIGNED",
        "unknown publisher": "REGISTRY-SIGNATURE-UNKNOWN-KEY",
        "unapproved": "REGISTRY-UNAPPROVED",
        "expired": "REGISTRY-APPROVAL-EXPIRED",
        "unknown approver": "REGISTRY-APPROVAL-UNKNOWN-KEY",
        "self-approved": "REGISTRY-SIGNATURE-UNKNOWN-KEY",
        "pinned": "REGISTRY-MANIFEST-PINNED",
        "channel by an unknown key": "REGISTRY-CHANNEL-UNKNOWN-KEY",
        "no previous": "REGISTRY-CHANNEL-EMPTY",
    }


def test_lower_trust_is_possible_only_by_saying_so(registry: Registry) -> None:
    c = registry.layout.container
    signed = TrustConfig(require="signature", publisher_keys=(registry.publisher_key.public,))
    assert (
        resolve(registry.serving, ReleaseConfig(model=MODEL, version="3", container=c), signed, record=False).approver
        == ""
    )
    assert code(registry, signed, "unsigned") == "REGISTRY-SIGNATURE-UNSIGNED"
    found = resolve(
        registry.serving,
        ReleaseConfig(model=MODEL, version="unsigned", container=c),
        TrustConfig(require="none"),
        record=False,
    )
    assert found.publisher == ""


def test_nobody_approves_their_own(registry: Registry) -> None:
    with pytest.raises(DynamoBlobError, match="REGISTRY-APPROVAL-SELF"):
        approve(registry.approver, registry.layout, MODEL, "3", registry.publisher_key)


def test_previous_is_what_a_rollback_serves(registry: Registry) -> None:
    release = ReleaseConfig(model=MODEL, channel="previous", container=registry.layout.container)
    assert resolve(registry.serving, release, registry.trust, record=False).manifest.version == "1"


def test_what_is_resolved_is_told_with_approver_and_age(registry: Registry) -> None:
    message = resolve(
        registry.serving, ReleaseConfig(model=MODEL, container=registry.layout.container), registry.trust, record=False
    ).message()
    assert message.approver == registry.approver_key.public and message.resolved_from == "channel:current"
    assert 0 <= message.age_s < 600 and message.approved_at.endswith("Z") and len(message.manifest_digest) == 64
