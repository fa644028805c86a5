"""Python code that a release brings along: run only if the release says so, an approver allowed it, and it is the release's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.common.engine.config import WorkerConfig
from components.common.errors import DynamoBlobError


def check_remote_code(config: WorkerConfig, model_path: Path) -> None:
    """Refuse `trust_remote_code` for a release without the right to it. Raises WEIGHTS-REMOTE-CODE.

    model_path: the verified model directory. Approvals exist only for code that the approver allowed
    (`dynamo release approve --allow remote-code`), so `trust.require: approval` is the proof of that.
    """
    if not config.engine.extra.get("trust_remote_code"):
        return
    manifest = json.loads((model_path / "manifest.json").read_text())
    why = do = ""
    foreign = [n for path in sorted(model_path.glob("*.json")) for n in _foreign(path)]
    if foreign:
        why, do = f"{foreign[0]} names code of another repository", "publish that code with the model"
    elif not any(f["path"].endswith(".py") for f in manifest["files"]):
        return  # there is none to run
    elif not manifest["provenance"].get("remote_code"):
        why = "the release does not say that it brings code (provenance.remote_code)"
        do = "publish it with --provenance remote_code=true"
    elif config.weights.trust.require != "approval":
        why = f"trust.require is {config.weights.trust.require}: no approver allowed it"
        do = "approve it (`dynamo release approve --allow remote-code`) and set trust.require: approval"
    if why:
        raise DynamoBlobError(
            "WEIGHTS-REMOTE-CODE", "the model's own code may not run", where=f"{config.name}: engine.extra.trust_remote_code", why=why, do=do,
        )  # fmt: skip


def _foreign(path: Path) -> Iterator[str]:
    """Entries of `auto_map` like ``someone/repo--module.Class``: transformers would take them from elsewhere."""

    def walk(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            if "auto_map" in value:
                yield from leaves(value["auto_map"])
            for v in value.values():
                yield from walk(v)
        elif isinstance(value, list):
            for v in value:
                yield from walk(v)

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict | list):
            for v in value.values() if isinstance(value, dict) else value:
                yield from leaves(v)
        else:
            yield value

    if path.name == "manifest.json":
        return
    try:
        found = list(walk(json.loads(path.read_text())))
    except (ValueError, RecursionError):
        return
    yield from (f"{path.name}: {x}" for x in found if isinstance(x, str) and "--" in x)
