"""What a secondary tier remembers while it works: requests, jobs of several chunks, and how each chunk ended."""

from __future__ import annotations

import time
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from components.common.kv.mover import Reason, Unit
from components.common.transfer.base import Transport


class RequestState:
    """What the tier remembers of one request (in vLLM's ReqContext)."""

    __slots__ = ("chain", "cls", "loaded", "missed", "names", "tenant", "transport")

    def __init__(self, tenant: str, cls: str, transport: Transport | None) -> None:
        self.tenant, self.cls, self.transport = tenant, cls, transport
        self.names: dict[OffloadKey, str] = {}
        self.missed: set[OffloadKey] = set()
        self.loaded = 0
        self.chain: dict[tuple[int, int], str] = {}


class Requests(dict[int, RequestState]):
    """One request as each tier of the engine knows it: vLLM's ReqContext keeps one state per class, whoever sets it."""


class Job:
    """A vLLM job of several chunks; it is over when each chunk has ended."""

    __slots__ = ("began", "ended", "good", "left", "load", "nbytes", "queued", "request", "total")

    def __init__(self, load: bool, left: int, request: str = "", queued: int = 0) -> None:
        self.load, self.left, self.total, self.good, self.nbytes = load, left, left, list[OffloadKey](), 0
        self.request, self.queued = request, queued
        self.began = self.ended = time.monotonic()


class End(NamedTuple):
    job_id: int
    key: OffloadKey
    unit: Unit
    reason: Reason
    request: RequestState
    parent: str | None
    tokens: int
    at: float


def handed_over(key: OffloadKey, context: ReqContext) -> bool:
    """A chunk that the prefill worker computed and stores itself; decode adds what it generates."""
    prompt = (context.kv_transfer_params or {}).get("remote_num_tokens")
    end = context.get_offload_key_position(key)
    return isinstance(prompt, int) and end is not None and end <= prompt
