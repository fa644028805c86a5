"""Engines, stores and comparisons shared by the KV tests and `bench kv`."""
