"""What a registry command that was killed leaves under the temporary directory, and who removes it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from graphs.cli import _registry


def test_the_next_call_removes_what_a_killed_one_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert _registry._SAS_S <= 900, "longer than that no token of a killed call lives"
    places = {
        "left": f"dynamo-blob-cli-{gone.pid}-a", "young": f"dynamo-blob-cli-{gone.pid}-b", "running": f"dynamo-blob-cli-{os.getpid()}-c",
        "another's": f"dynamo-blob-{gone.pid}-d",
    }  # fmt: skip
    for name, directory in places.items():
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "publisher.json").write_text("{}")
        if name != "young":
            os.utime(tmp_path / directory, (time.time() - 1000,) * 2)
    _registry._sweep_scratch()
    assert {p.name for p in tmp_path.iterdir()} == set(places.values()) - {places["left"]}
