"""Is a model directory whole? Asked before it is published: a version never changes, so half a download would stay half."""

from __future__ import annotations

import json
from pathlib import Path

from components.common.errors import DynamoBlobError

DO = "complete the download or export it again, then publish"


def refuse_incomplete(directory: Path, where: str = "") -> None:
    """Raises RELEASE-SOURCE when an index names a shard that is not there, or a configuration is not JSON."""
    for path in directory.glob("config.json"):
        _object(path, where)
    for path in sorted(directory.glob("*.safetensors.index.json")):
        shards = _object(path, where).get("weight_map", {})
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise _error(path, where, "weight_map is no mapping of tensors to files")
        missing = sorted({s for s in shards.values() if not (directory / s).is_file()})
        if missing:
            raise _error(path, where, f"it names {len(missing)} files that are not there: {', '.join(missing[:3])}")


def _object(path: Path, where: str) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise _error(path, where, f"it cannot be read as JSON: {e}") from None
    if not isinstance(found, dict):
        raise _error(path, where, "it holds no JSON object")
    return found


def _error(path: Path, where: str, why: str) -> DynamoBlobError:
    return DynamoBlobError(
        "RELEASE-SOURCE", "the model directory is not whole", where=where or str(path), why=f"{path.name}: {why}", do=DO
    )
