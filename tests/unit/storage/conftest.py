"""Fixtures of these tests."""

from tests.registry_store import registry

__all__ = ["registry"]


@pytest.fixture(autouse=True)
def no_shared_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens of a test stay in its own directory, not in the node's."""
    from components.common.storage import shared_token

    monkeypatch.setattr(shared_token, "DIRECTORY", tmp_path)
