"""print the graph as Kubernetes objects

    dynamo render graphs/aks/gpt-oss-120b-h200.yaml --cluster deploy/cluster.example.yaml > graph.yaml
    dynamo render graphs/aks/qwen3.5-27b-h200.yaml --cluster deploy/cluster.example.yaml --api v1alpha1 --out rendered/

The objects come from the same plan as `dynamo serve` runs; nothing else is read. The order is the order to apply them in.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from components.common.errors import DynamoBlobError
from graphs.check import check_loaded
from graphs.compile import compile_plan
from graphs.document import Document, load
from graphs.load import Graph, read_graph, type_name, validate
from graphs.plan import Plan
from graphs.render.site import cluster_site
from graphs.spec import ClusterSpec

TARGETS = ("aks",)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", help="graph file")
    parser.add_argument("--target", choices=TARGETS, default="aks")
    parser.add_argument("--api", default="v1beta1", help="version of the operator's objects: v1beta1 or v1alpha1")
    parser.add_argument("--cluster", type=Path, help="YAML with the cluster's part, instead of the graph's `cluster`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--no-admission", action="store_true", help="leave the cluster-wide admission policies out")
    parser.add_argument("--out", type=Path, help="directory to write one file an object to, instead of printing")


def run(args: argparse.Namespace) -> int:
    from graphs.render.output import manifests, to_yaml, write
    from graphs.render.requirements import warnings

    graph = with_cluster(read_graph(args.graph, args.set), args.cluster)
    refuse(graph)
    try:
        plan = plan_of(graph)
        objects = manifests(plan, args.api, admit=not args.no_admission)
    except DynamoBlobError as e:
        raise located(e, graph) from e
    for warning in warnings(plan):
        print(f"warning: {warning}", file=sys.stderr)
    if args.out:
        write(args.out, plan.graph, objects)
        print(json.dumps({"written": len(objects)}) if args.json else f"{len(objects)} objects in {args.out}")
    else:
        print(json.dumps(objects, indent=1) if args.json else to_yaml(objects), end="\n" if args.json else "")
    return 0


def refuse(graph: Graph) -> None:
    """What `dynamo check` calls an error is not rendered: `serve` would not start it either."""
    errors = [f for f in check_loaded(graph) if f.severity == "error"]
    if errors:
        error = errors[0].as_error()
        error.data["findings"] = [f.as_json() for f in errors]
        raise error


def located(error: DynamoBlobError, graph: Graph) -> DynamoBlobError:
    """`error`, with the line of the file where it says ``cluster.some.key``."""
    if error.where.startswith("cluster."):
        error.where = graph.place(*error.where.split("."))
    return error


def cluster_plan(
    graph_file: Path | str, sets: list[str] | tuple[str, ...] = (), cluster_file: Path | None = None
) -> Plan:
    """The graph's plan for a cluster."""
    return plan_of(with_cluster(read_graph(graph_file, sets), cluster_file))


def plan_of(graph: Graph) -> Plan:
    assert graph.spec.cluster is not None
    return compile_plan(graph, cluster_site(graph.spec, graph.spec.cluster))


def with_cluster(graph: Graph, cluster_file: Path | None) -> Graph:
    """The graph with the cluster's part: its own, or a file's. Raises RENDER-NO-CLUSTER, and GRAPH-* at the guilty line."""
    if cluster_file is None:
        if graph.spec.cluster is None:
            raise DynamoBlobError(
                "RENDER-NO-CLUSTER", "the graph says nothing of a cluster", where=graph.document.name,
                why="images, identities and addresses are the cluster's",
                do="add `cluster:` to it, or pass --cluster FILE (deploy/cluster.example.yaml)",
            )  # fmt: skip
        return graph
    part: Document = load(cluster_file)
    if not isinstance(part.data, dict):
        raise DynamoBlobError(
            "GRAPH-INVALID", "a cluster file is a mapping", where=part.place(()), why=f"found {type_name(part.data)}",
            do="copy deploy/cluster.example.yaml and replace its values",
        )  # fmt: skip
    spec, findings = validate(ClusterSpec, part)
    if spec is None:
        raise findings[0].as_error()
    own = graph.document
    lines = {("cluster", *path): f"{part.name}:{line}:{column}" for path, (line, column) in part.marks.items()}
    document = replace(
        own,
        marks={path: mark for path, mark in own.marks.items() if path[:1] != ("cluster",)},
        origins={**{path: o for path, o in own.origins.items() if path[:1] != ("cluster",)}, **lines},
    )
    return Graph(graph.spec.model_copy(update={"cluster": spec}), document)
