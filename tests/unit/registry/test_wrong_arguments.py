"""Wrong input of `dynamo publish` and `dynamo release` is refused by name, before a store is started or asked."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from components.common.errors import DynamoBlobError
from components.common.registry.layout import Layout
from graphs.cli import _registry, main, release
from tests.memory_account import Blobs, MemoryAccount

LAYOUT = Layout("weights")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ("release approve m 1 --days nan", "CLI-ARGUMENT", "--days nan"),
        ("release approve m 1 --days -3", "CLI-ARGUMENT", "--days -3"),
        ("release approve m 1 --days 0", "CLI-ARGUMENT", "--days 0"),
        ("release approve m 1 --days 1e12", "CLI-ARGUMENT", "--days 1e+12"),
        ("release approve m 1 --allow remote_code", "CLI-ARGUMENT", "remote_code"),
        ("release verify m --parallel 0", "CLI-ARGUMENT", "--parallel 0"),
        ("release verify m --parallel 100000", "CLI-ARGUMENT", "--parallel 100000"),
        ("release collect --delete --grace-hours nan", "CLI-ARGUMENT", "--grace-hours nan"),
        ("release collect --delete --grace-hours -5", "CLI-ARGUMENT", "--grace-hours -5"),
        ("release collect --grace-hours inf", "CLI-ARGUMENT", "--grace-hours inf"),
        ("release archive m 1 notaurl", "CLI-ARGUMENT", "notaurl"),
        ("release archive m 1 https:///x", "CLI-ARGUMENT", "https:///x"),
        ("release show m ../1", "REGISTRY-NAME", "../1"),
        ("release diff m 1 ../1", "REGISTRY-NAME", "../1"),
        ("release audit a//b", "REGISTRY-NAME", "a//b"),
        ("publish . m 1 --parallel 0", "CLI-ARGUMENT", "--parallel 0"),
    ],
)
def test_a_wrong_argument_is_named(
    argv: str, code: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "model")
    monkeypatch.setattr(_registry, "_embedded", lambda *_: pytest.fail("the store was asked"))
    assert main.main([*argv.split(), "--json", "--state", str(tmp_path / "state")]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == code and says in error["what"] and error["do"]


def test_a_model_without_a_record_is_no_whole_chain(capsys: pytest.CaptureFixture[str]) -> None:
    """Once a typing error was answered with "0 records, the chain is whole"."""
    account = MemoryAccount(Blobs({c: {} for c in LAYOUT.containers}))
    registry = _registry.Registry(account, LAYOUT, None, None)  # type: ignore[arg-type]
    with pytest.raises(DynamoBlobError) as caught:
        release._audit(argparse.Namespace(model="wlak", json=False), registry)
    assert caught.value.code == "REGISTRY-AUDIT-MISSING" and "wlak" in caught.value.what
    assert caught.value.where.endswith("weights-audit/audit/wlak/") and caught.value.why and caught.value.do
    assert capsys.readouterr().out == ""
