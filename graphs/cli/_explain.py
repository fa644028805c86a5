"""`dynamo status --explain`: load or recompute, in each worker's own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from graphs.plan import Plan


def explanations(plan: Plan) -> dict[str, dict[str, Any]]:
    """{worker: what its cost model wrote last}; {"why": ...} where there is nothing to show. Workers without tiers are left out."""
    out: dict[str, dict[str, Any]] = {}
    for process in plan.processes:
        kv = (process.config or {}).get("kv")
        if not kv:
            continue
        policy = kv["settings"].get("policy") or {}
        path = policy.get("status_file", "")
        if not policy:
            out[process.name] = {"why": "no cost policy: everything that is held is loaded"}
        elif not path:
            out[process.name] = {"why": "its policy writes no status file"}
        else:
            out[process.name] = _read(Path(path))
    return out


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {"why": "no request has been decided yet"}
    except (OSError, ValueError) as e:
        return {"why": f"{path}: {type(e).__name__}: {e}"}
    return found if isinstance(found, dict) else {"why": f"{path}: not a report"}


def explained(name: str, found: dict[str, Any]) -> Group | Text:
    """One worker's account as text and a table."""
    if "why" in found:
        return Text(f"{name}: {found['why']}", "dim")
    tiers = "; ".join(
        f"{t} {v['fixed_s'] * 1e3:.0f} ms + {v['bytes_per_s'] / 1e6:.0f} MB/s ({v['measured']} measured)"
        for t, v in found["tiers"].items()
    )
    ratio = found["actual_over_predicted_p50"]
    lines = (
        f"{name}: mode {found['mode']}, {found['requests']} requests, {found['loads']} loaded",
        f"  believes   {tiers}; prefill measured {found['prefill_measured']} times",
        f"  predicted  {found['predicted_s']:.2f} s, actual {found['served_s']:.2f} s"
        + (f" (median actual / predicted {ratio:.2f})" if ratio is not None else ""),
        f"  regret     {found['regret_s']:.2f} s against the other way as predicted; exploring {found['explored_s']:.2f} s"
        f" in requests, {found['probed_s']:.2f} s beside them; {found['switches']} switches, {found['missed_deadlines']} deadlines missed,"
        f" {found['extrapolated']} extrapolated",
    )
    out = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("tokens", "recompute", *found["tiers"], "better"):
        out.add_column(column, justify="right")
    for row in found["table"]:
        ways = {"recompute": row["recompute_s"], **{t: row[f"{t}_s"] for t in found["tiers"]}}
        mark = "*" if row["extrapolated"] else ""
        best = min(ways, key=lambda w: ways[w])
        out.add_row(
            str(row["tokens"]), f"{ways['recompute']:.3f} s{mark}", *(f"{ways[t]:.3f} s" for t in found["tiers"]), best
        )
    return Group(Text("\n".join(lines)), out, Text("  * beyond what was measured", "dim"))
