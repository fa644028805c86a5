"""The tenants file: what it refuses, and that no secret stands in it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.errors import DynamoBlobError
from components.common.kv.classes import Classes
from components.common.messages.salt import compose, tenant_hash
from components.common.messages.tenants import TenantsFile, read_salt_key, rotate_salt_key, stamp
from graphs.cli.main import main

KEY = hashlib.sha256(b"sk-acme").hexdigest()
GOOD: dict[str, Any] = {
    "tenants": {"acme": {"keys": [KEY], "salt_key_file": "acme.salt", "class": "long"}, "plain": {"keys": ["0" * 64], "salt_key_file": "p.salt"}},
    "classes": {"long": {"ttl_s": 10, "max_ttl_s": 20, "bytes": "2GiB", "container": "kv-long"}, "std": {"ttl_s": 10, "max_ttl_s": 10, "bytes": 5},
                "eph": {"ttl_s": 10, "max_ttl_s": 10, "bytes": 0, "ephemeral": True}},
    "default_class": "std",
}  # fmt: skip


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "tenants.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}))
    return path


def test_a_good_file(tmp_path: Path) -> None:
    f = TenantsFile.load(write(tmp_path))
    assert (f.class_of("acme"), f.class_of("plain"), f.class_of("nobody")) == ("long", "std", "std")
    assert (f.tenant_of("sk-acme"), f.tenant_of(KEY), f.tenant_of("")) == ("acme", None, None)
    assert f.by_hash()[tenant_hash("acme")] == "acme" and f.classes["long"].bytes == 2 * 2**30
    assert f.salt_key_path("acme") == tmp_path / "acme.salt"


def test_the_example_is_valid_and_holds_no_key() -> None:
    f = TenantsFile.load(Path(__file__).parents[2] / "configs/tenants/example.yaml")
    assert f.default_class == "standard" and f.classes["ephemeral"].ephemeral


def test_a_fault_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    good = "classes:\n  std: {ttl_s: 9, max_ttl_s: 9, bytes: 1}\ndefault_class: std\n"
    path.write_text(good + "tenants:\n  a:\n    keys: [sk-1]\n    salt_key_file: x\n    claas: std\n")
    with pytest.raises(DynamoBlobError) as e:
        TenantsFile.load(path)
    assert e.value.where == f"{path}:8:5" and "'tenants.a.claas' (did you mean 'class'?)" in e.value.why
    path.write_text(good + "tenants:\n  a:\n    keys: 5\n    salt_key_file: [x]\n")
    with pytest.raises(DynamoBlobError) as e:
        TenantsFile.load(path)
    assert e.value.where == f"{path}:6:5" and "line 7:5: tenants.a.salt_key_file" in e.value.why
    path.write_text(good.replace("default_class: std", "default_class: stb"))
    with pytest.raises(DynamoBlobError) as e:
        TenantsFile.load(path)
    assert e.value.where == f"{path}:3:1"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"default_class": "stb"}, "did you mean 'std'"),
        ({"tenants": {"a": {"keys": [KEY], "salt_key_file": "x", "class": "nope"}}}, "no class 'nope'"),
        ({"tenants": {"a": {"keys": ["sk-acme"], "salt_key_file": "x"}}}, "never API keys"),
        ({"tenants": {"a": {"keys": [], "salt_key_file": "x"}}}, "keys"),
        ({"tenants": {n: {"keys": [KEY], "salt_key_file": "x"} for n in "ab"}}, "share an API key"),
        ({"classes": {"std": {"ttl_s": 9, "max_ttl_s": 3, "bytes": 1}}}, "shorter than ttl_s"),
        ({"classes": {"Std!": {"ttl_s": 9, "max_ttl_s": 9, "bytes": 1}}}, "class name"),
        ({"classes": {"std": {"ttl_s": 9, "max_ttl_s": 9, "bytes": "5 parsecs"}}}, "size"),
        ({"classes": {"std": {"ttl_s": 9, "max_ttl_s": 9, "bytes": 1, "container": "Bad_Name"}}}, "container name"),
        ({"classes": {"std": {"ttl_s": 9, "max_ttl_s": 9, "bytes": "9" * 400 + "GiB"}}}, "size"),
        ({"classes": {"std": {"ttl_s": 9, "max_ttl_s": float("inf"), "bytes": 1}}}, "finite"),
        ({"classes": {"std": {"ttl_s": 9, "max_ttl_s": 9, "bytes": 1, "tll": 1}}}, "unknown key"),
        ({"classes": {}}, "classes"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(DynamoBlobError) as e:
        TenantsFile.load(write(tmp_path, **changes))
    assert e.value.code == "CONFIG-INVALID" and why in str(e.value)


@pytest.mark.parametrize(
    "line", ["? [a, b]\n: c", "? {a: b}\n: c", "x: !!bool maybe", "x: !!int ''", "x: !!float ''", "x: !!timestamp foo"]
)  # fmt: skip
def test_what_the_yaml_parser_trips_over_has_a_code(tmp_path: Path, line: str) -> None:
    path = write(tmp_path)
    path.write_text(f"{line}\n{path.read_text()}")
    with pytest.raises(DynamoBlobError, match="TENANTS-UNREADABLE"):
        TenantsFile.load(path)


def test_unreadable_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(DynamoBlobError, match="TENANTS-UNREADABLE"):
        TenantsFile.load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(DynamoBlobError, match="TENANTS-UNREADABLE"):
        TenantsFile.load(tmp_path / "bad.yaml")


def test_salt_keys_are_private_long_and_rotate(tmp_path: Path) -> None:
    f = TenantsFile.load(write(tmp_path))
    with pytest.raises(DynamoBlobError, match="TENANTS-SALT-KEY"):
        f.salt_key("acme")
    path = f.salt_key_path("acme")
    rotate_salt_key(path)
    first = f.salt_key("acme")
    before = stamp(tmp_path / "tenants.yaml", f)
    rotate_salt_key(path)
    assert f.salt_key("acme") != first and path.stat().st_mode & 0o777 == 0o600
    assert stamp(tmp_path / "tenants.yaml", f) != before, "readers must notice a rotation"
    assert compose("acme", "long", first, "") != compose("acme", "long", f.salt_key("acme"), "")
    path.chmod(0o644)
    with pytest.raises(DynamoBlobError, match="0644"):
        read_salt_key(path)
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(DynamoBlobError, match="at least 16"):
        read_salt_key(path)


def test_placement_by_salt(tmp_path: Path) -> None:
    c = Classes.of_file(TenantsFile.load(write(tmp_path)), "kv")
    public, key = "0" * 32, b"k" * 32
    assert c.place(None, public) == (public, "std", "kv")
    assert c.place(str(compose("acme", "long", key, "")), public) == (tenant_hash("acme"), "long", "kv-long")
    assert c.place(str(compose("acme", "eph", key, "")), public).container == ""
    assert c.place(str(compose("acme", "removed", key, "")), public).container == "kv"
    assert c.place("a salt of a client", public) == ("", "std", ""), "nobody could purge it: it is not put"


def test_lifecycle_backs_every_class_up_and_never_under_a_day(tmp_path: Path) -> None:
    classes = {
        **GOOD["classes"], "slow": {"ttl_s": 10, "max_ttl_s": 9.5 * 86400, "bytes": 5}, "slower": {"ttl_s": 10, "max_ttl_s": 2 * 86400, "bytes": 5, "container": "kv-long"},
    }  # fmt: skip
    rules = Classes.of_file(TenantsFile.load(write(tmp_path, classes=classes)), "kv").lifecycle()["rules"]
    assert isinstance(rules, list)
    days: dict[str, int] = {}
    for r in rules:
        prefixes = r["definition"]["filters"]["prefixMatch"]
        assert 0 < len(prefixes) <= 10, "the service takes ten"
        for prefix in prefixes:
            assert prefix not in days, "of two rules for one prefix the shorter would win"
            days[prefix] = r["definition"]["actions"]["baseBlob"]["delete"]["daysAfterModificationGreaterThan"]
    assert days == {f"{c}/{d}": n for c, n in (("kv", 11), ("kv-long", 3)) for d in "0123456789abcdef"}
    assert not any(f"{c}/_control/epochs.json".startswith(p) for c in ("kv", "kv-long") for p in days)
    assert len({r["name"] for r in rules}) == len(rules)
    assert all(n >= 1 for n in days.values())


def test_an_unset_variable_is_no_tenant_to_purge(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("", "  "):
        assert main(["purge", "--tenant", name]) != 0
        assert "PURGE-NO-TENANT" in capsys.readouterr().err
