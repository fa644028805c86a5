"""A YAML file as plain data that remembers where every value stands.

`Document.place(path)` gives ``file:line:column`` for a path of keys and indexes, so that every
error about a graph or profile names its line. YAML 1.2; duplicate keys are refused, aliases are
refused (a graph is read by people), size, depth and number of nodes are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from components.common.errors import DynamoBlobError

MAX_BYTES, MAX_NODES, MAX_DEPTH, MAX_DIGITS = 1 << 20, 20_000, 32, 80
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """`data`: dicts, lists and scalars. `marks`: key path -> (line, column), 1-based. `name`: the file as the user named it."""

    name: str
    data: Any
    text: str = ""
    marks: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """Values that come from elsewhere (``--set``), and from where."""

    def place(self, path: KeyPath) -> str:
        """``file:line:column`` of the value at `path`, or of its nearest parent that stands in the file or was ``--set``."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
            if path[:end] in self.marks:
                line, column = self.marks[path[:end]]
                return f"{self.name}:{line}:{column}"
            if end:  # a mapping that exists only because something in it was set
                for key, origin in self.origins.items():
                    if key[:end] == path[:end]:
                        return origin
        return self.name

    def with_value(self, dotted: str, text: str) -> Document:
        """A copy with ``a.b.c`` set to `text` read as YAML. Raises GRAPH-SET-INVALID."""
        keys = dotted.split(".")
        if not all(keys):
            raise DynamoBlobError(
                "GRAPH-SET-INVALID", f"'{dotted}' is not a path of keys", where=f"--set {dotted}",
                do="write --set components.decode.replicas=2",
            )  # fmt: skip
        origin = f"--set {dotted}={text}"
        value = parse(
            text, f"--set {dotted}"
        ).data  # nothing is said about a value that may be a secret before that is known
        data = _copy_along(self.data if isinstance(self.data, dict) else {}, keys, value, f"--set {dotted}")
        return Document(self.name, data, self.text, self.marks, {**self.origins, tuple(keys): origin})


def _copy_along(node: dict[Any, Any], keys: list[str], value: Any, origin: str) -> dict[Any, Any]:
    head, rest = keys[0], keys[1:]
    below = node.get(head)
    if rest and below is not None and not isinstance(below, dict):
        raise DynamoBlobError(
            "GRAPH-SET-INVALID", f"'{head}' is not a mapping", where=origin, why=f"it holds a {type(below).__name__}",
            do="set the key itself, or a key of a mapping",
        )  # fmt: skip
    if not rest and value is None and head in node:  # --set a.b=null: as if the line were not there
        return {k: v for k, v in node.items() if k != head}
    return {**node, head: _copy_along(below or {}, rest, value, origin) if rest else value}


def load(path: Path | str) -> Document:
    """The document in a file. Raises GRAPH-UNREADABLE or GRAPH-YAML."""
    try:
        raw = Path(path).read_bytes()
        if len(raw) > MAX_BYTES:
            raise ValueError(f"{len(raw)} bytes, at most {MAX_BYTES} are read")
        text = raw.decode("utf-8")
    except (OSError, ValueError) as e:
        raise DynamoBlobError(
            "GRAPH-UNREADABLE", "the file cannot be read", where=str(path), why=str(e),
            do="pass the path of a YAML file; the shipped graphs lie in graphs/",
        ) from None  # fmt: skip
    return parse(text, str(path))


def parse(text: str, name: str) -> Document:
    """The document in `text`. Raises GRAPH-YAML with the place of the first fault."""
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise _fault(where, re.sub(r"'[^']{20,}'", "'…'", str(e.problem or e.context))) from None  # it may be a secret
    except YAMLError as e:  # the reader's errors (control characters) carry no mark of the same shape
        raise _fault(name, str(e).splitlines()[0]) from None
    except RecursionError:
        raise _fault(_too_deep(text, name), f"more than {MAX_DEPTH} levels", "nest less deeply") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError) as e:
        raise _fault(name, f"{type(e).__name__}: {e}") from None  # the parser's own failures on broken input
    marks: dict[KeyPath, tuple[int, int]] = {}
    data = None if node is None else _build(node, (), name, marks, iter(range(MAX_NODES)), set())
    return Document(name, data, text, marks)


def _too_deep(text: str, name: str) -> str:
    """Where the nesting goes beyond MAX_DEPTH. Events come one by one; only composing recurses."""
    depth = 0
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > MAX_DEPTH:
                return f"{name}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"
    except (YAMLError, ValueError, RecursionError):
        pass
    return name


def _fault(where: str, why: str, do: str = "correct the YAML at this place") -> DynamoBlobError:
    return DynamoBlobError("GRAPH-YAML", "the file is not valid YAML", where=where, why=why, do=do)


def _build(
    node: Node, path: KeyPath, name: str, marks: dict[KeyPath, tuple[int, int]], budget: Iterator[int], seen: set[int]
) -> Any:
    line, column = node.start_mark.line + 1, node.start_mark.column + 1
    marks.setdefault(path, (line, column))
    where = f"{name}:{line}:{column}"
    if id(node) in seen:
        raise _fault(where, "an alias (*name) stands here", "write the value out; graphs hold no aliases")
    seen.add(id(node))
    if next(budget, None) is None or len(path) > MAX_DEPTH:
        raise _fault(where, f"more than {MAX_NODES} values or {MAX_DEPTH} levels", "split the file")
    if isinstance(node, ScalarNode):
        return _scalar(node, where)
    if isinstance(node, SequenceNode):
        return [_build(item, (*path, i), name, marks, budget, seen) for i, item in enumerate(node.value)]
    if not isinstance(node, MappingNode):
        raise _fault(where, f"unknown node {type(node).__name__}")
    out: dict[str, Any] = {}
    for key_node, value_node in node.value:
        at = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
        key_where = f"{name}:{at[0]}:{at[1]}"
        if not isinstance(key_node, ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
            raise _fault(key_where, "a key must be a plain word")
        key = key_node.value
        if key in out:
            raise _fault(key_where, f"the key '{key}' stands twice", "keep one of them")
        marks[(*path, key)] = at
        out[key] = _build(value_node, (*path, key), name, marks, budget, seen)
    return out


def _scalar(node: ScalarNode, where: str) -> Any:
    """YAML 1.2 core schema: null, bool, int, float, str; everything else is refused."""
    kind, text = str(node.tag).removeprefix("tag:yaml.org,2002:"), str(node.value)
    try:
        match kind:
            case "str" | "timestamp":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int" if len(text) > MAX_DIGITS:
                raise _fault(where, f"a number of {len(text)} characters", "no setting takes a number that large")
            case "int":
                return (
                    int(text.replace("_", ""), 0)
                    if text.lstrip("+-")[:2].lower() in ("0x", "0o")
                    else int(text.replace("_", ""))
                )
            case "float":
                low = text.lower().replace("_", "")
                return float(low.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError as e:
        raise _fault(where, str(e)) from None
    raise _fault(where, f"the tag '{node.tag}' is not used in graphs", "write a plain value")
