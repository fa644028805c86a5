"""Fixtures every test may use; each area keeps its own in a module of helpers. And the order: long files first."""

from __future__ import annotations

import hypothesis
import pytest

hypothesis.settings.register_profile("here", deadline=None)  # a busy machine is no counterexample
hypothesis.settings.load_profile("here")

pytest_plugins = ["tests.kvtools.fixtures"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start graphs, then files that start engines, then the rest: two workers then end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, "e2e" not in item.path.parts))
