"""Where everything of a registry lies: three containers of the weights account.

    <container>             objects/<blake3>                          created once, collected when nothing refers to it
                            releases/<model>/<version>/manifest.json  created once, never changed
                            releases/<model>/<version>/manifest.sig   created once; its creation makes the release visible
                            artifacts/<release>/<key>/...             see `artifacts`
    <container>-approvals   approvals/<model>/<version>.json          signed by an approver
                            channels/<model>.json                     the only pointer; signed, moved by ETag compare-and-swap
    <container>-audit       audit/<model>/000001.log                  append blobs, one hash chain per model

Three, because a SAS or a role assignment is given per container: the publisher cannot approve, the
approver cannot change content, serving can only read and append to the record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from components.common.errors import DynamoBlobError
from components.common.registry.manifest import FileEntry

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,94}"
_MODEL = re.compile(rf"{_PART}(/{_PART})?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,62}")


@dataclass(frozen=True)
class Layout:
    """Names in the registry whose content container is `container`."""

    container: str = "weights"

    @property
    def approvals(self) -> str:
        return f"{self.container}-approvals"

    @property
    def audit(self) -> str:
        return f"{self.container}-audit"

    @property
    def containers(self) -> tuple[str, str, str]:
        return self.container, self.approvals, self.audit

    @staticmethod
    def object(digest: str) -> str:
        return f"objects/{digest}"

    @staticmethod
    def release(model: str, version: str) -> str:
        return f"releases/{model}/{version}"

    def manifest(self, model: str, version: str) -> str:
        return f"{self.release(model, version)}/manifest.json"

    def signature(self, model: str, version: str) -> str:
        return f"{self.release(model, version)}/manifest.sig"

    @staticmethod
    def approval(model: str, version: str) -> str:
        return f"approvals/{model}/{version}.json"

    @staticmethod
    def channel(model: str) -> str:
        return f"channels/{model}.json"

    @staticmethod
    def audit_log(model: str, number: int) -> str:
        return f"audit/{model}/{number:06d}.log"

    def place(self, file: FileEntry) -> tuple[str, str]:
        """Container and blob that hold `file`."""
        return file.container or self.container, file.blob


def split_release(blob: str) -> tuple[str, str] | None:
    """(model, version) of ``releases/<model>/<version>/manifest.json``; None for any other name."""
    parts = blob.split("/")
    if len(parts) in (4, 5) and parts[0] == "releases" and parts[-1] == "manifest.json":
        return "/".join(parts[1:-2]), parts[-2]
    return None


def check_names(model: str, version: str = "") -> None:
    """Raises REGISTRY-NAME unless both can be names in the registry (`version` may be empty)."""
    if not _MODEL.fullmatch(model):
        raise DynamoBlobError(
            "REGISTRY-NAME", f"'{model}' cannot be a model name", why="letters, digits, '.', '_', '-', with at most one '/' between",
            do="choose another name",
        )  # fmt: skip
    if version and not _VERSION.fullmatch(version):
        raise DynamoBlobError(
            "REGISTRY-NAME", f"'{version}' cannot be a version", why="letters, digits, '.', '_', '+', '-'; at most 63", do="choose another version",
        )  # fmt: skip


def path_problem(path: str) -> str:
    """Why `path` cannot be the path of a file inside a model directory; "" if it can."""
    parts = path.split("/")
    if not path or "" in parts or "." in parts or ".." in parts or "\\" in path:
        return f"{path!r} leaves the model directory"
    if len(path) > 1024 or any(len(p.encode(errors="replace")) > 255 for p in parts):
        return f"{path[:60]!r}… is too long: 255 bytes a name, 1024 characters in all"
    if not path.isprintable():  # control characters, line separators, and bytes that are not UTF-8
        return f"{path!r} has characters that cannot be printed"
    return ""


def check_paths(paths: Iterable[str], where: str) -> None:
    """Raises REGISTRY-NAME unless all `paths` can lie in one directory."""
    known = set(paths)
    for path in sorted(known):
        parents = {path[:i] for i, c in enumerate(path) if c == "/"}
        above = sorted(parents & known)
        problem = path_problem(path) or (f"{above[0]!r} is a file and the directory of {path!r}" if above else "")
        if problem:
            raise DynamoBlobError(
                "REGISTRY-NAME", "a file of the model cannot be named in a manifest", where=where, why=problem, do="rename it, then publish"
            )  # fmt: skip
