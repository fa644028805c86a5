"""Fixtures of these tests."""

from pathlib import Path

import pytest

from components.common.storage import shared_token
from tests.registry_store import registry

__all__ = ["no_shared_tokens", "registry"]


@pytest.fixture(autouse=True)
def no_shared_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens of a test stay in its own directory, not in the node's."""
    monkeypatch.setattr(shared_token, "DIRECTORY", tmp_path)
