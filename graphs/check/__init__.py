"""`dynamo check`: refuses graphs that would start healthy and answer wrongly, or fail later than here."""

from graphs.check.run import check_graph, check_loaded

__all__ = ["check_graph", "check_loaded"]
