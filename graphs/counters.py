"""What workers count about themselves: vLLM's own metrics, read at each worker's /metrics."""

from __future__ import annotations

import asyncio
import re

from graphs.launch.http import ask
from graphs.plan import Plan, Process

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(\{[^}]*\})?\s+(\S+)", re.MULTILINE)
Counters = dict[str, float]
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""Where vLLM says the KV of a prompt token came from: computed, HBM, or a connector (a tier, or another worker)."""


def workers(plan: Plan) -> list[Process]:
    return [p for p in plan.processes if p.component in ("prefill", "decode", "aggregated")]


async def counters(process: Process, timeout_s: float = 10.0) -> Counters:
    """``name{labels}`` -> value of a worker's /metrics. Raises OSError, TimeoutError or ValueError."""
    port = next(p for p in process.ports if p.name == "system")
    answer = await ask(f"http://{port.host}:{port.number}/metrics", timeout_s=timeout_s)
    return parse_metrics(answer.body.decode())


def parse_metrics(text: str) -> Counters:
    return {f"{m[1]}{m[2] or ''}": float(m[3]) for m in _SAMPLE.finditer(text) if _number(m[3])}


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def total(counted: Counters, name: str, **labels: str) -> float:
    """Sum over all samples of a metric whose labels include `labels`."""
    want = [f'{k}="{v}"' for k, v in labels.items()]
    return sum(v for k, v in counted.items() if k.split("{")[0] == name and all(w in k for w in want))


async def sources(plan: Plan, timeout_s: float = 2.0) -> dict[str, dict[str, int]]:
    """{worker: {source: prompt tokens since its start}}; a worker that does not answer in time is left out."""

    async def one(process: Process) -> dict[str, int]:
        counted = await counters(process, timeout_s)
        return {s: int(total(counted, "vllm:prompt_tokens_by_source_total", source=s)) for s in SOURCES}

    asked = workers(plan)
    found = await asyncio.gather(*(one(p) for p in asked), return_exceptions=True)
    return {p.name: f for p, f in zip(asked, found, strict=True) if isinstance(f, dict)}
