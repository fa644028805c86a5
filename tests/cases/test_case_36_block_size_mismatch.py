"""Case 36 (vllm#42895): prefill and decode with other block sizes start healthy and answer wrongly. `check` refuses the graph."""

from pathlib import Path

import pytest

from graphs.check import check_graph
from graphs.cli.main import main

DISAGG = Path(__file__).resolve().parents[2] / "graphs" / "disagg.yaml"


@pytest.mark.parametrize(
    "sets",
    [
        ["components.decode.engine.block_size=64"],
        ["components.prefill.engine.block_size=256"],
        ["components.router.block_size=64"],
    ],
)
def test_case_36_graphs_whose_ends_count_other_blocks_are_refused(sets: list[str]) -> None:
    found = [f for f in check_graph(DISAGG, sets) if "BLOCK-SIZE" in f.code]
    assert found and found[0].severity == "error" and "128" in found[0].why


def test_case_36_serve_refuses_it_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "serve",
                str(DISAGG),
                "--quiet",
                "--state",
                str(tmp_path),
                "--set",
                "components.decode.engine.block_size=64",
            ]
        )
        == 1
    )
    assert "CHECK-BLOCK-SIZE" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_case_36_equal_block_sizes_pass_whatever_they_are() -> None:
    assert check_graph(DISAGG, ["engine.set.block_size=64"]) == []
