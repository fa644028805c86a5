"""Plan -> every object, in the order in which they are applied, and as YAML that every parser reads alike."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from components.common.errors import DynamoBlobError, nearest
from graphs.plan import Plan
from graphs.render import admission, base, core, network, requirements
from graphs.render.aks_v1alpha1 import V1Alpha1
from graphs.render.aks_v1beta1 import V1Beta1
from graphs.render.base import Manifest, Renderer
from graphs.render.pods import pods

RENDERERS: dict[str, type[Renderer]] = {"v1beta1": V1Beta1, "v1alpha1": V1Alpha1}


def manifests(plan: Plan, api: str = "v1beta1", admit: bool = True) -> list[Manifest]:
    """Every object of the graph. `admit`: with the admission policies. Raises RENDER-*."""
    if api not in RENDERERS:
        raise DynamoBlobError("RENDER-API", f"no renderer for '{api}'", why=nearest(api, RENDERERS))
    requirements.demand(plan)
    found = pods(plan)
    nodes = [p for p in found if p.kind == "node"]
    out: list[Manifest] = []
    if admit:
        out += [admission.parameters(plan), *admission.policies()]
    out += core.service_accounts(plan, found)
    if plan.discovery == "kubernetes":
        out.append(core.discovery_binding(plan, found))
    out += network.policies(plan, found)
    out.append(core.plans(plan))
    out += [core.daemon_set(plan, p) for p in nodes]
    out += [core.api_service(plan)] if any(p.kind == "frontend" for p in found) else []
    out += [core.router_service(plan)] if any(p.name == "router" for p in found) else []
    out += core.disruption_budgets(plan, found)
    out.append(core.pod_monitor(plan, found))
    out.append(RENDERERS[api]().deployment(plan, found))
    return out


_WRITTEN = re.compile(r"^\d{2,}-[a-z]+-.+\.yaml$")


def write(out: Path, graph: str, objects: list[Manifest]) -> None:
    """One file an object, numbered in the order to apply them. Raises RENDER-OUT.

    Files of an earlier render of this graph go: `kubectl apply -f` would apply them too, an old graph last.
    """
    names = [f"{i:02d}-{item['kind'].lower()}-{item['metadata']['name']}.yaml" for i, item in enumerate(objects)]
    path = out
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(out.iterdir()):
            if path.name not in names and _WRITTEN.match(path.name) and _is_of(path.read_bytes(), graph):
                path.unlink()
        for name, item in zip(names, objects, strict=True):
            path = out / name
            path.write_text(to_yaml([item]), encoding="utf-8")
    except OSError as e:
        raise DynamoBlobError(
            "RENDER-OUT", "the objects cannot be written", where=str(path), why=e.strerror or str(e),
            do="give --out a directory that can be written; do not apply what stands there now",
        ) from e  # fmt: skip


def _is_of(text: bytes, graph: str) -> bool:
    """Whether a file is an object of `graph` that we rendered."""
    try:
        labels = YAML(typ="safe").load(text)["metadata"]["labels"]
        return bool(labels[base.GRAPH_LABEL] == graph and labels[base.MANAGED_LABEL[0]] == base.MANAGED_LABEL[1])
    except (YAMLError, ValueError, KeyError, TypeError):
        return False


_PLAIN = re.compile(r"^[A-Za-z/][A-Za-z0-9_./-]*$")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf"}


def to_yaml(objects: list[Manifest]) -> str:
    """YAML documents. Strings that any YAML version might take for something else (on, y, 0x1, 1_000) are quoted."""
    writer = YAML()
    writer.default_flow_style = False
    writer.width = 4096
    writer.indent(mapping=2, sequence=4, offset=2)
    out = []
    for item in objects:
        text = io.StringIO()
        writer.dump(_safe(item), text)
        out.append(text.getvalue())
    return "---\n".join(out)


def _safe(value: Any) -> Any:
    if isinstance(value, dict):
        return CommentedMap((_key(k), _safe(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return [_short(_safe(v)) for v in value]
    if not isinstance(value, str):
        return value
    if "\n" in value:
        return LiteralScalarString(value)
    return value if _is_plain(value) else DoubleQuotedScalarString(value)


def _short(item: Any) -> Any:
    """A small mapping in a list (a variable, a port, a mount) stands on one line."""
    if isinstance(item, CommentedMap) and len(repr(item)) < 160 and not any(isinstance(v, list) for v in item.values()):
        item.fa.set_flow_style()
    return item


def _key(key: str) -> str:
    return key if _is_plain(key) else DoubleQuotedScalarString(key)


def _is_plain(text: str) -> bool:
    return bool(_PLAIN.match(text)) and text.lower() not in _WORDS
