"""JSON Schema of the graph file, for editors

dynamo schema > graph.schema.json
# first line of a graph:  # yaml-language-server: $schema=graph.schema.json
"""

from __future__ import annotations

import argparse
import json

from graphs.spec import json_schema


def add(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=1))
    return 0
