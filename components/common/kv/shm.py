"""Shared memory that killed engines leave behind.

vLLM's DRAM tier lives in /dev/shm/vllm_offload_<engine>.mmap, its message queues in psm_* segments. A killed engine
unlinks neither. Files that a live process has open or mapped are never touched.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

ROOT = Path("/dev/shm")
PATTERNS = ("vllm_offload_*.mmap", "psm_????????")


def sweep(min_age_s: float = 60.0, root: Path = ROOT, proc: Path = Path("/proc")) -> list[str]:
    """Remove our own leftovers older than `min_age_s` (a file just created is not mapped yet); names removed."""
    now, mine = time.time(), os.getuid()
    candidates: dict[tuple[int, int], Path] = {}
    for pattern in PATTERNS:
        for path in root.glob(pattern):
            with contextlib.suppress(OSError):
                info = path.stat()
                if info.st_uid == mine and now - info.st_mtime >= min_age_s:
                    candidates[info.st_dev, info.st_ino] = path
    if not candidates:
        return []
    used = _mapped_inodes(proc)
    if used is None:  # not every process could be looked at: better a leftover than a live engine's memory
        return []
    removed = []
    for (_, inode), path in candidates.items():
        if inode not in used:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def _mapped_inodes(proc: Path) -> set[int] | None:
    """Inodes that any of our processes has mapped; None when one of them cannot be read."""
    out: set[int] = set()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != os.getuid():
                continue
            for line in (entry / "maps").read_text().splitlines():
                parts = line.split(None, 5)
                if len(parts) == 6 and parts[5].startswith(str(ROOT)):
                    out.add(int(parts[4]))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        except PermissionError:
            if entry.name != "1":  # init of a container: never an engine
                return None
    return out
