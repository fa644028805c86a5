"""What of a client's request reaches Dynamo's frontend. Everything it may not decide is taken out or refused here.

The body is parsed and written anew, so that what was checked is what is sent (no parser differences, no duplicate
keys). Headers go through a list of allowed ones. `nvext` fields fall in three groups: allowed, dropped (pins, token
data, salts, upload targets: silently, clients of other gateways send them), unknown (refused: a new Dynamo may give
them a meaning).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from components.common.messages.salt import parse as parse_salt
from components.frontend.errors import Refusal

HEADERS = ("traceparent", "tracestate", "baggage", "accept")
"""Request headers passed on. Not here: x-dynamo-*, x-*-instance-id, x-*-dp-rank, x-tenant-id, session and request ids."""

NVEXT_ALLOWED = frozenset(
    {"greed_sampling", "use_raw_prompt", "annotations", "max_thinking_tokens", "extra_fields", "agent_hints"}
)
NVEXT_DROPPED = frozenset(
    {
        "backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank", "token_data", "cache_salt", "metadata_upload",
        "request_timestamp_ms", "routing_constraints", "router",
    }
)  # fmt: skip
ANNOTATIONS = frozenset({"formatted_prompt", "token_ids", "llm_metrics"})
"""Annotations a client may ask for. `query_instance_id` would answer with routing instead of text."""

AGENT_HINTS = frozenset({"osl", "expected_output_tokens"})
"""Hints that cost others nothing. Not here: priority."""

MAX_DEPTH = 64
MAX_NESTED = 50_000
"""Objects and lists in one body: a tool-using conversation has thousands."""

MAX_MEMBERS = 200_000
"""Members of all objects of one body together."""

_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{:]')

INLINE = 65_536
"""Bytes of a body up to which reading it may stand in the way of other requests (1 ms)."""


def decode(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises Refusal(400)."""
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTED or raw.count(b":") > MAX_MEMBERS:
        _check_marks(raw)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, ValueError) as e:
        raise Refusal(400, "invalid_json", f"the body is not valid JSON: {e}") from None
    except RecursionError:
        raise Refusal(400, "invalid_json", "the body is nested too deeply") from None
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_json", "the body must be a JSON object")
    _check_shape(body)
    return body


def encode(body: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(body)


def clean(body: dict[str, Any]) -> str:
    """Take out, in place, what clients may not set; returns the client's own cache salt ("" for none).

    A salt in the composed shape is dropped: it can only be a copy of one of ours.
    """
    salt = body.pop("cache_salt", None)
    nvext = body.get("nvext")
    if nvext is not None:
        if not isinstance(nvext, dict):
            raise Refusal(400, "invalid_request", "nvext must be an object", param="nvext")
        salt = salt or nvext.get("cache_salt")
        body["nvext"] = _nvext(nvext)
        if not body["nvext"]:
            del body["nvext"]
    elif "nvext" in body:
        del body["nvext"]
    if salt is None or salt == "":
        return ""
    if not isinstance(salt, str):
        raise Refusal(400, "invalid_request", "cache_salt must be a string", param="cache_salt")
    if len(salt) > 1024:
        raise Refusal(
            400, "invalid_request", f"cache_salt has {len(salt)} characters; at most 1024", param="cache_salt"
        )
    return "" if parse_salt(salt) else salt


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in HEADERS if name in headers}


def ask_worker_ids(body: dict[str, Any]) -> None:
    """Make Dynamo report which workers served (`nvext.worker_id` of the answer)."""
    nvext = body.setdefault("nvext", {})
    fields = nvext.get("extra_fields") or []
    if "worker_id" not in fields:
        nvext["extra_fields"] = [*fields, "worker_id"]


def _nvext(nvext: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(nvext.keys() - NVEXT_ALLOWED - NVEXT_DROPPED)
    if unknown:
        raise Refusal(
            400, "invalid_request", f"unknown nvext field(s): {', '.join(map(repr, unknown))[:200]}", param="nvext"
        )
    kept = {k: v for k, v in nvext.items() if k in NVEXT_ALLOWED and v is not None}
    for key in ("annotations", "extra_fields"):
        if key in kept and (not isinstance(kept[key], list) or not all(isinstance(a, str) for a in kept[key])):
            raise Refusal(400, "invalid_request", f"nvext.{key} must be a list of strings", param=f"nvext.{key}")
    if "annotations" in kept:
        kept["annotations"] = [a for a in kept["annotations"] if a in ANNOTATIONS]
    if "agent_hints" in kept:
        if not isinstance(kept["agent_hints"], dict):
            raise Refusal(400, "invalid_request", "nvext.agent_hints must be an object", param="nvext.agent_hints")
        kept["agent_hints"] = {k: v for k, v in kept["agent_hints"].items() if k in AGENT_HINTS}
    return kept


def _check_marks(raw: bytes) -> None:
    """The same bound before anything is built of it: building holds up every thread for as long as it takes."""
    nested = members = 0
    for mark in _MARKS.finditer(raw):
        kind = raw[mark.start()]
        nested += kind in b"[{"
        members += kind == 0x3A
        if nested > MAX_NESTED or members > MAX_MEMBERS:
            raise Refusal(
                400, "invalid_json", f"the body has more than {MAX_NESTED} objects and lists, or {MAX_MEMBERS} members"
            )


def _check_shape(body: dict[str, Any]) -> None:
    todo, seen = [(body, MAX_DEPTH)], 0
    while todo:
        item, left = todo.pop()
        children = item.values() if isinstance(item, dict) else item
        nested = [c for c in children if isinstance(c, (dict, list))]
        seen += len(nested)
        if nested and not left:
            raise Refusal(400, "invalid_json", f"the body is nested deeper than {MAX_DEPTH} levels")
        if seen > MAX_NESTED:
            raise Refusal(400, "invalid_json", f"the body has more than {MAX_NESTED} objects and lists")
        todo += [(c, left - 1) for c in nested]
