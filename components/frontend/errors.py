"""What clients see when something is wrong: OpenAI's error body, a stable code, a status that tells what to do."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable", 504: "timeout_error",
}  # fmt: skip


class Refusal(Exception):
    """A request answered by the gateway itself. `retry_after` in seconds makes a Retry-After header."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param, self.retry_after = status, code, message, param, retry_after

    def response(self, request_id: str) -> web.Response:
        headers = {"x-request-id": request_id}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return web.Response(
            status=self.status,
            body=error_body(self.status, self.code, self.message, self.param),
            headers=headers,
            content_type="application/json",
        )


def error_body(status: int, code: str | None, message: str, param: str | None = None) -> bytes:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return json.dumps(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}, ensure_ascii=False
    ).encode()


def from_upstream(status: int, body: bytes, unhealthy: str) -> Refusal:
    """Dynamo's `{"message", "type", "code"}` as ours. 5xx become 503 with Retry-After: nothing was answered, a retry is safe.

    So does 404: the gateway passes on no model but its own, and Dynamo does not know that one only while it has no worker.
    """
    message = _message(body)
    if status in (404, 500, 502, 503, 504, 529):
        return Refusal(503, "unavailable", unhealthy or message or "the request could not be served", retry_after=2)
    if status == 429:
        return Refusal(429, "overloaded", message or "the workers are busy", retry_after=1)
    return Refusal(status, "invalid_request", message or f"refused with status {status}")


def sse_error(code: str, message: str, *, torn: bool) -> bytes:
    """An SSE event that ends a stream which cannot be finished. `torn`: the last event sent is incomplete."""
    return (b"\n\n" if torn else b"") + b"data: " + error_body(503, code, message) + b"\n\ndata: [DONE]\n\n"


def _message(body: bytes) -> str:
    try:
        raw: Any = json.loads(body)
    except ValueError:
        return body[:200].decode("utf-8", "replace").strip()
    if isinstance(raw, dict):
        inner = raw.get("error")
        found = (inner.get("message") if isinstance(inner, dict) else inner) or raw.get("message") or ""
        return str(found)
    return ""
