"""Where the values of a YAML text stand, so that what is said about a file names its lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import yaml

Place = Callable[[Sequence[str | int]], str]
"""(keys and indexes of a value) -> "line:column", 1-based, of it or of its nearest parent in the text; "" when unknown."""


def places(text: str) -> Place:
    """For a text that has been read without a fault; its nesting is the reader's to bound. Composed when first asked."""
    marks: dict[tuple[str | int, ...], tuple[int, int]] = {}
    seen: set[int] = set()

    def walk(node: yaml.Node | None, path: tuple[str | int, ...]) -> None:
        if node is None or id(node) in seen:  # aliases share a node; expanding them may never end
            return
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                at = (*path, str(key.value))
                marks.setdefault(at, (key.start_mark.line + 1, key.start_mark.column + 1))
                walk(value, at)
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                marks.setdefault((*path, i), (value.start_mark.line + 1, value.start_mark.column + 1))
                walk(value, (*path, i))

    def place(path: Sequence[str | int]) -> str:
        if not seen:
            walk(yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), ())
        for end in range(len(path), 0, -1):
            if found := marks.get(tuple(path[:end])):
                return f"{found[0]}:{found[1]}"
        return ""

    return place
