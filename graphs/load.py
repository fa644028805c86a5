"""From a graph file to a checked `Graph`: YAML, ``--set`` values, secrets refused, types checked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from components.common.config import fields_at
from components.common.errors import DynamoBlobError, nearest
from graphs.document import Document, KeyPath, load
from graphs.spec import GraphSpec

M = TypeVar("M", bound=BaseModel)

SECRETS = (
    (
        "an account key",
        re.compile(
            r"(?i:Account|SharedAccess)Key\s*=|(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{86}==(?![A-Za-z0-9+/=])"
            # without its padding only where it looks random: a path may be as long
            r"|(?<![A-Za-z0-9+/])(?=[a-z0-9+/]*[A-Z])(?=[A-Z0-9+/]*[a-z])(?=[A-Za-z+/]*[0-9])[A-Za-z0-9+/]{86}(?![A-Za-z0-9+/=])"
        ),
    ),
    (
        "a shared access signature",
        re.compile(r"SharedAccessSignature\s*=|\bsig=[A-Za-z0-9%+/]{16,}|\bsv=\d{4}-\d\d-\d\d&"),
    ),
    ("a private key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")),
    (
        "an access token",
        re.compile(
            r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|eyJ[A-Za-z0-9_-]{10,}\.eyJ)"
        ),
    ),
    ("a password in a URL", re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]+:[^/\s@]+@")),
)
_SECRET_NAMES = re.compile(
    r"(?i)(account_?key|password|passwd|secret|client_secret|api_?key|access_?token|connection_?string|\bsas)$"
)
_SECRET_NAMES_ALLOWED = {"sas_file"}
_SECRET_VARIABLES = re.compile(
    r"(?i)(^|_)(token|pass|passwd|password|passphrase|pwd|secret|credentials?|sas|(?<!public_)(?<!cache_)(?<!sort_)(?<!partition_)key)(_?\d+)?$"
)
"""Names of environment variables that hold secrets: HF_TOKEN, DB_PASS, DB_PASSWORD_1, OPENAI_KEY."""
_NO_SECRET = re.compile(r"(?i)^(/.*|\d{1,4}|true|false|yes|no|on|off|none|auto)$")


@dataclass(frozen=True)
class Finding:
    """One thing `check` has to say. `severity`: error = would fail or answer wrongly; warning = worth knowing."""

    code: str
    what: str
    where: str
    why: str = ""
    do: str = ""
    severity: str = "error"

    def as_json(self) -> dict[str, str]:
        return dict(self.__dict__)

    def as_error(self) -> DynamoBlobError:
        return DynamoBlobError(self.code, self.what, where=self.where, why=self.why, do=self.do)


@dataclass(frozen=True)
class Graph:
    """A graph file that has been read and typed; `document` knows where every value stands."""

    spec: GraphSpec
    document: Document

    def place(self, *path: str | int) -> str:
        return self.document.place(path)


def read_graph(path: Path | str, sets: list[str] | tuple[str, ...] = ()) -> Graph:
    """The graph in a file. Raises the first finding as a `DynamoBlobError`."""
    graph, findings = examine(path, sets)
    if graph is None or findings:
        error = findings[0].as_error()
        if len(findings) > 1:
            error.data["findings"] = [f.as_json() for f in findings]
            error.why = f"{error.why} ({len(findings) - 1} more: run `dynamo check`)".strip()
        raise error
    return graph


def examine(path: Path | str, sets: list[str] | tuple[str, ...] = ()) -> tuple[Graph | None, list[Finding]]:
    """The graph, or None, and everything wrong with the file itself. Raises only what keeps it from being read."""
    document = load(path)
    for number, item in enumerate(sets, 1):
        key, eq, value = item.partition("=")
        if not eq:
            raise DynamoBlobError(
                "GRAPH-SET-INVALID", "it has no '='", where=f"--set number {number}", do="write --set key.path=value"
            )
        document = document.with_value(key.strip(), value)
    secrets, empty = find_secrets(document), find_empty(document)
    if not isinstance(document.data, dict):
        return None, secrets or [
            Finding(
                "GRAPH-INVALID",
                "a graph is a mapping",
                document.place(()),
                f"found {type_name(document.data)}",
                "start with `graph: NAME`",
            )
        ]
    if secrets:
        return None, secrets  # alone: other findings quote what they found
    spec, findings = validate(GraphSpec, document)
    if spec is None or empty:
        return None, [*empty, *findings]
    return Graph(spec, document), findings


def validate(model: type[M], document: Document) -> tuple[M | None, list[Finding]]:
    """`document` as a `model`, or what is wrong with it, each with its place."""
    try:
        return model.model_validate(document.data), []
    except ValidationError as e:
        return None, [_finding(model, document, item) for item in e.errors(include_url=False)]
    except RecursionError:
        return None, [Finding("GRAPH-INVALID", "the file is nested too deeply", document.name)]


def _finding(model: type[BaseModel], document: Document, item: Any) -> Finding:
    loc: KeyPath = tuple(p for p in item["loc"] if p != "[key]")
    where, dotted = document.place(loc), ".".join(str(p) for p in loc)
    kind, value = item["type"], item.get("input")
    if kind == "extra_forbidden":
        valid = fields_at(model, loc[:-1])
        return Finding(
            "GRAPH-UNKNOWN-KEY",
            f"unknown key '{dotted}'",
            where,
            nearest(str(loc[-1]), valid),
            "correct the key or remove it",
        )
    if kind == "missing":
        return Finding(
            "GRAPH-MISSING-KEY", f"the key '{dotted}' is missing", where, "it has no default", f"add '{loc[-1]}'"
        )
    why = item["msg"].removeprefix("Value error, ")
    if kind == "string_type" and len(loc) >= 2 and loc[-2] == "env":
        return Finding(
            "GRAPH-ENV-VALUE", f"the environment variable '{loc[-1]}' has no string value", where,
            f"{type_name(value)} {value!r} stands at {dotted}; an environment holds strings only", f'quote it: {loc[-1]}: "{value}"',
        )  # fmt: skip
    return Finding(
        "GRAPH-WRONG-VALUE",
        f"wrong value at '{dotted}'",
        where,
        f"{why} (found {f'{type_name(value)} {_short(value)}'.rstrip()})",
        "correct the value",
    )


def type_name(value: object) -> str:
    names = {
        dict: "a mapping",
        list: "a list",
        str: "the string",
        bool: "the boolean",
        int: "the integer",
        float: "the number",
    }
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def _short(value: object) -> str:
    text = "" if value is None or isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def find_empty(document: Document) -> list[Finding]:
    """`router:` with nothing behind it is a slip for `router: {}`; to YAML it would mean "no router"."""
    components = document.data.get("components") if isinstance(document.data, dict) else None
    return [
        Finding(
            "GRAPH-WRONG-VALUE",
            f"nothing stands behind 'components.{name}'",
            document.place(("components", name)),
            "it could mean its defaults or that there is none",
            "write {} for its defaults, or leave the line out",
        )
        for name, value in (components.items() if isinstance(components, dict) else ())
        if value is None and name in ("router", "prefill", "decode", "aggregated")  # the others refuse it by type
    ]


def find_secrets(document: Document) -> list[Finding]:
    """Keys, SAS and connection strings anywhere in the file, comments included. The finding never repeats them."""
    do = "remove it and rotate it; graphs name identities or files, never secrets"
    out = []
    for number, line in enumerate(document.text.splitlines(), 1):
        for kind, pattern in SECRETS:
            found = pattern.search(line)
            if found:
                out.append(
                    Finding(
                        "GRAPH-SECRET",
                        f"{kind} stands in the graph",
                        f"{document.name}:{number}:{found.start() + 1}",
                        "",
                        do,
                    )
                )
    lines = {f.where.rsplit(":", 1)[0] for f in out}
    for path, value in walk(document.data):
        where = document.place(path)
        if not isinstance(value, str) or not value or where.rsplit(":", 1)[0] in lines:
            continue
        key = str(path[-1]) if path else ""
        variable = len(path) > 1 and path[-2] == "env" and _SECRET_VARIABLES.search(key) and not _NO_SECRET.match(value)
        named = _SECRET_NAMES.search(key) and key not in _SECRET_NAMES_ALLOWED and not value.startswith("/")
        if named or variable or any(p.search(value) for _, p in SECRETS):
            masked = where.split("=", 1)[0] + "=***" if where.startswith("--set") else where
            out.append(Finding("GRAPH-SECRET", f"a secret stands at '{'.'.join(map(str, path))}'", masked, "", do))
    return out


def walk(data: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """Every scalar with its path."""
    if isinstance(data, dict):
        return [x for k, v in data.items() for x in walk(v, (*path, k))]
    if isinstance(data, list):
        return [x for i, v in enumerate(data) for x in walk(v, (*path, i))]
    return [] if isinstance(data, float) and math.isnan(data) else [(path, data)]
