"""Models made by tools: two processes that make the same one at once both end well."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.graph import SAMPLE
from tools import tiny_model


def test_a_model_that_another_process_made_meanwhile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = tmp_path / "tiny", os.rename

    def late(work: Path, output: Path) -> None:
        output.mkdir()
        (output / "config.json").write_text("the other's")
        real(work, output)

    monkeypatch.setattr(tiny_model.os, "rename", late)
    tiny_model.build("full", made, SAMPLE)
    assert (made / "config.json").read_text() == "the other's" and list(tmp_path.iterdir()) == [made], "no leftovers"


def test_a_model_that_cannot_be_put_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(work: Path, output: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny_model.os, "rename", never)
    with pytest.raises(OSError, match="No space"):
        tiny_model.build("full", tmp_path / "tiny", SAMPLE)
