"""Case 46 (grove#228): a malformed environment variable kept pods pending without an error. `check` names line and field."""

from pathlib import Path

import pytest

from graphs.check import check_graph

TEXT = (Path(__file__).resolve().parents[2] / "graphs" / "disagg.yaml").read_text()


@pytest.mark.parametrize(
    ("env", "code", "field"),
    [
        ("{RUST_LOG: 1}", "GRAPH-ENV-VALUE", "RUST_LOG"),
        ("{RUST_LOG: true}", "GRAPH-ENV-VALUE", "RUST_LOG"),
        ("{RUST_LOG: }", "GRAPH-ENV-VALUE", "RUST_LOG"),
        ("{RUST_LOG: {a: b}}", "GRAPH-ENV-VALUE", "RUST_LOG"),
        ("[{name: A, value: b}]", "GRAPH-WRONG-VALUE", "components.decode.env"),
        ("{'RUST LOG': a}", "CHECK-ENV-NAME", "RUST LOG"),
        ("{1A: a}", "CHECK-ENV-NAME", "1A"),
        ("{'A=B': a}", "CHECK-ENV-NAME", "A=B"),
        ("{'': a}", "CHECK-ENV-NAME", "''"),
    ],
)
def test_case_46_line_and_field_are_named(tmp_path: Path, env: str, code: str, field: str) -> None:
    path = tmp_path / "g.yaml"
    path.write_text(TEXT.replace("decode: {replicas: 1}", f"decode:\n    replicas: 1\n    env: {env}"))
    line = next(n for n, x in enumerate(path.read_text().splitlines(), 1) if "env:" in x)
    found = [f for f in check_graph(path) if f.code == code]
    assert found and found[0].where.startswith(f"{path}:{line}:") and field in found[0].what


def test_case_46_a_proper_variable_passes(tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    path.write_text(TEXT.replace("decode: {replicas: 1}", 'decode: {replicas: 1, env: {RUST_LOG: "1"}}'))
    assert check_graph(path) == []
