"""Reproducible benchmarks, each by name: ``dynamo bench NAME [--quick] --json FILE``.

A benchmark is a module here with ``def bench(report: Report, quick: bool) -> None`` and a docstring
whose first line says what it compares; NAME is the module's name with dashes. It adds raw samples in
the order they were taken (`report.add`), interleaved by round, and the ceilings beside them.
Quick forms take minutes, up to about twelve on two cores.
"""
