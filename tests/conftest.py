"""Fixtures every test may use; each area keeps its own in a module of helpers."""

pytest_plugins = ["tests.kvtools.fixtures"]
