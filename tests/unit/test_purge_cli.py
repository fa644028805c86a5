"""`dynamo purge` with files that are not what they should be: a code each, before anything is changed; never a fault of the program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.common.kv.containers import CONTAINERS_OBJECT
from components.common.kv.epochs import EPOCHS_OBJECT, scoped
from components.common.kv.generations import COPY_OBJECT
from components.common.kv.purge import FORMAT, Purge, PurgeConfig, State
from components.common.kv.store import PURGE_PREFIX, WORKERS_PREFIX, KvStore
from components.common.messages.salt import tenant_hash
from components.common.registry.signing import SigningKey
from graphs.cli.main import main
from tests import kv_azurite
from tests.kv_azurite import NAMESPACE, name

ACME = tenant_hash("acme")
DEEP = b"[" * 100_000


store = kv_azurite.kv_store


def plan(folder: Path, store: KvStore, **more: Any) -> Path:
    settings = {
        "dram_bytes": 1 << 20, "account": store.account.config.model_dump(mode="json"), "container": store.control,
        "epochs_refresh_s": 0.2, "epochs_stale_s": 0.5, "store_deadline_s": 0.5, **more,
    }  # fmt: skip
    path = folder / "plan.json"
    path.write_text(
        json.dumps({"processes": [{"name": "decode-0", "config": {"kv": {"settings": settings}}}, {"name": "x"}]})
    )
    return path


def purge(folder: Path, path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["purge", "--tenant", "acme", "--plan", str(path), "--state", str(folder / "state"), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"processes": 5}', '{"processes": [5]}', '{"processes": [{"config": {"kv": {"a": 1}}}]}',
        '{"processes": [{"config": {"kv": [1]}}]}', '{"processes": [{"config": [1]}]}', DEEP.decode(),
    ],
)  # fmt: skip
def test_a_plan_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    code, out = purge(tmp_path, path, capsys)
    assert (code, out["error"]["code"]) == (1, "PURGE-PLAN")


def test_a_report_or_key_that_cannot_be_written_is_refused_first(
    tmp_path: Path, store: KvStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan(tmp_path, store)
    for bad in (tmp_path / "no such folder" / "r.json", tmp_path):
        code, out = purge(tmp_path, path, capsys, "--report", str(bad))
        assert (code, out["error"]["code"]) == (1, "PURGE-REPORT")
    (tmp_path / "state").write_text("a file")
    code, out = purge(tmp_path, path, capsys)
    assert (code, out["error"]["code"]) == (1, "PURGE-KEY")
    assert [i.name for i in store.list(store.control)] == [], "nothing was begun"


def test_control_files_that_cannot_be_read(tmp_path: Path, store: KvStore, capsys: pytest.CaptureFixture[str]) -> None:
    path, state = plan(tmp_path, store), f"{PURGE_PREFIX}{ACME}.json"
    store.write(CONTAINERS_OBJECT, DEEP)
    code, out = purge(tmp_path, path, capsys)
    assert (code, out["error"]["code"]) == (1, "KV-CONTAINERS-INVALID")
    store.delete(store.control, [CONTAINERS_OBJECT])
    for bad in (EPOCHS_OBJECT, COPY_OBJECT, state):
        store.write(bad, DEEP)
    code, out = purge(tmp_path, path, capsys)
    assert (code, out["error"]["code"]) == (1, "KV-EPOCHS-INVALID")


STATE = {"id": "a", "tenant": ACME, "generation": 7, "cutoff": 0.0, "started": 1.0, "phase": "delete"}
BAD = {
    "empty": b"", "a list": b"[]", "deep": DEEP, "no field": b"{}", "a field too many": json.dumps({**STATE, "more": 1}).encode(),
    "another tenant": json.dumps({**STATE, "tenant": "b" * 32}).encode(), "text for a number": json.dumps({**STATE, "deleted": "x"}).encode(),
    "no number": json.dumps({**STATE, "cutoff": float("nan")}).encode(), "infinite": json.dumps({**STATE, "raised_at": float("inf")}).encode(),
    "a sample of nothing": json.dumps({**STATE, "sample": [1, 2]}).encode(),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_state_that_says_nothing_begins_anew(store: KvStore, what: str) -> None:
    config = PurgeConfig(account=store.account.config, control=store.control, containers=(), tenant="acme", settle_s=0)
    store.raise_epoch(ACME)
    store.write(f"{PURGE_PREFIX}{ACME}.json", BAD[what])
    begun = Purge(config, store, SigningKey.generate())._begin()
    assert (begun.resumed, begun.generation, begun.phase) == (0, 2, "raise")
    assert State.parse(json.dumps(STATE).encode(), ACME) == State(**STATE)  # type: ignore[arg-type]


def test_a_whole_purge_over_bad_control_files(
    tmp_path: Path, store: KvStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is restored or begun anew is purged and proven as ever; the report names what lies on nodes."""
    store.raise_epoch(ACME, at_least=4)
    store.account.put(store.control, name("acme", 1, generation=4), b"x")
    store.write(EPOCHS_OBJECT, b"{")
    store.write(f"{PURGE_PREFIX}{ACME}.json", DEEP)
    store.write(
        f"{WORKERS_PREFIX}w.json", b'{"seen": {"%s": {"generation": Infinity, "under_way": 1}}}' % ACME.encode()
    )
    path = plan(tmp_path, store, nvme_dir=str(tmp_path / "nvme"))
    code, report = purge(tmp_path, path, capsys, "--report", str(tmp_path / "r.json"))
    assert code == 0, report
    assert report["generation"] == 5 and report["deleted"] == 1 and report["probe"]["clean"]
    assert report["directories"]["workers"] == ["decode-0"] and "unreachable" in report["directories"]["says"]
    assert list(report["workers"]["silent"]) == ["w"] and json.loads((tmp_path / "r.json").read_text()) == report
    assert scoped(NAMESPACE, 5) == scoped(NAMESPACE, store.read_epochs()[ACME])


def test_a_report_is_verified_and_an_altered_one_or_a_strangers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    report, state = tmp_path / "report.json", ["--state", str(tmp_path / "s")]

    def asked(document: dict[str, Any], *more: str) -> tuple[int, str]:
        report.write_text(json.dumps(document, indent=1))
        code = main(["purge", "--verify", str(report), *more, *state])
        return code, "".join(capsys.readouterr())

    signed = json.loads(key.sign({"format": FORMAT, "id": "1", "tenant": "acme", "deleted": 7}))
    code, said = asked(signed, "--accept", key.public)
    assert code == 0 and key.public in said
    for document, accepted, why in (
        (signed | {"deleted": 8}, key.public, "REGISTRY-PURGE-BAD-SIGNATURE"),
        (signed, other.public, "REGISTRY-PURGE-UNKNOWN-KEY"),
        (signed | {"signature": ""}, key.public, "REGISTRY-PURGE-UNSIGNED"),
        ({"format": "else"}, key.public, "PURGE-REPORT"),
    ):
        code, said = asked(document, "--accept", accepted)
        assert code != 0 and why in said, said
    code, said = asked(signed)
    assert code != 0 and "REGISTRY-PURGE-UNKNOWN-KEY" in said, "this state's own key did not sign it"


@pytest.mark.parametrize("age", ["5000w", "9" * 400 + "d"])
def test_an_age_from_before_there_were_clocks(
    tmp_path: Path, store: KvStore, capsys: pytest.CaptureFixture[str], age: str
) -> None:
    code, said = purge(tmp_path, plan(tmp_path, store), capsys, "--older-than", age)
    assert (code, said["error"]["code"]) == (1, "CLI-ARGUMENT") and not list(store.list(store.control))


def test_names_and_files_nobody_thought_of(tmp_path: Path, store: KvStore, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = plan(tmp_path, store), tmp_path / "tenants.yaml"
    code, said = purge(tmp_path, path, capsys, "--tenant", "a\udcff")  # argv that is no UTF-8
    assert (code, said["error"]["code"]) == (1, "PURGE-TENANT-UNKNOWN")
    rule = "{ttl_s: 1, max_ttl_s: 2, bytes: 1, ephemeral: true}"
    file.write_text(
        f"tenants: {{acme: {{keys: ['{'0' * 64}'], salt_key_file: \"x\\0y\"}}}}\nclasses: {{a: {rule}}}\ndefault_class: a\n"
    )
    code, said = purge(tmp_path, path, capsys, "--tenants", str(file))
    assert (code, said["error"]["code"]) == (1, "TENANTS-SALT-KEY-FIXED")
    path = plan(tmp_path, store, container="", tenants_file=str(file))
    code, said = purge(tmp_path, path, capsys, "--keep-key")
    assert (code, said["error"]["code"]) == (1, "PURGE-NO-KV") and not list(store.list(store.control))
    file.write_text("classes: {a: {ttl: 1}}\ndefault_class: a\n")  # anyone's slip; a good copy still purges
    code, said = purge(tmp_path, path, capsys)
    assert (code, said["error"]["code"]) == (1, "CONFIG-INVALID")
    assert said["error"]["where"] == f"{file}:1:11" and "pass --tenants with a copy" in said["error"]["do"]


def test_a_name_nothing_can_check_is_said_to_have_had_nothing(
    tmp_path: Path, store: KvStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped name must not look like a purge of the right one."""
    store.account.put(store.control, name("acme", 1), b"x")
    argv = ["purge", "--plan", str(plan(tmp_path, store)), "--state", str(tmp_path / "state"), "--tenant"]
    assert main([*argv, "acmee"]) == 0 and "no object of a tenant 'acmee' was there" in capsys.readouterr().err
    assert main([*argv, "acme"]) == 0 and "no object of" not in capsys.readouterr().err
