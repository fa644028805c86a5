"""Fixtures of these tests."""

from tests.registry_store import registry

__all__ = ["registry"]
