"""The gateway's OpenAPI description, served at /openapi.json and tested against the gateway with schemathesis.

It names the fields that matter to the gateway and leaves the rest of OpenAI's to Dynamo (`additionalProperties`).
"""

from __future__ import annotations

import json
from typing import Any

from components.frontend.config import GatewayConfig

_ERRORS = {
    "400": "the request is not valid, or the prompt is too long", "401": "no or unknown API key", "404": "no such model", "408": "the body came too slowly",
    "413": "the body is too large", "415": "the body is not application/json", "422": "the request is not valid", "429": "a limit is reached; see Retry-After",
    "503": "no worker can serve now; see Retry-After",
}  # fmt: skip

_COMMON: dict[str, Any] = {
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 64},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "n": {"type": "integer", "minimum": 1, "maximum": 4},
    "seed": {"type": "integer", "minimum": 0, "maximum": 2**31},
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 4}]},
    "stream": {"type": "boolean"},
    "user": {"type": "string"},
    "cache_salt": {"type": "string", "maxLength": 1024, "description": "separates this caller's KV cache further; never joins it with another tenant's"},
}  # fmt: skip


def description(config: GatewayConfig) -> bytes:
    model = {"type": "string", "enum": [config.served_model]}
    chat = {
        "type": "object",
        "required": ["model", "messages"],
        "properties": {
            "model": model,
            "messages": {
                "type": "array", "minItems": 1,
                "items": {
                    "type": "object", "required": ["role", "content"], "additionalProperties": False,
                    "properties": {"role": {"type": "string", "enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
                },
            },
            **_COMMON,
        },
    }  # fmt: skip
    completion = {
        "type": "object", "required": ["model", "prompt"], "properties": {"model": model, "prompt": {"type": "string", "minLength": 1}, **_COMMON}
    }  # fmt: skip
    document = {
        "openapi": "3.1.0",
        "info": {"title": "dynamo-blob gateway", "version": "0.1.0", "description": "OpenAI's API before NVIDIA Dynamo's frontend"},
        "security": [{"key": []}] if config.auth == "keys" else [],
        "paths": {
            "/v1/chat/completions": {"post": _post("chat", "Answer a conversation", chat)},
            "/v1/completions": {"post": _post("completions", "Continue a text", completion)},
            "/v1/models": {"get": _get("models", "The models that answer now", {"type": "object", "required": ["object", "data"]}, ("401",))},
            "/v1/models/{model}": {
                "get": _get("model", "One model", {"type": "object", "required": ["id"]}, ("401", "404", "503"))
                | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]}
            },
            "/health": {"get": _get("health", "Would a request succeed?", {"type": "object", "required": ["status"]}) | {"security": []}},
            "/live": {"get": _get("live", "Is the process there?", {"type": "object", "required": ["status"]}, ()) | {"security": []}},
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Error": {
                    "type": "object", "required": ["error"],
                    "properties": {
                        "error": {
                            "type": "object", "required": ["message", "type", "code", "param"],
                            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "code": {"type": ["string", "null"]}, "param": {"type": ["string", "null"]}},
                        }
                    },
                }
            },
        },
    }  # fmt: skip
    return json.dumps(document).encode()


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}


def _post(name: str, summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    ok = {
        "description": "the answer; an event stream when `stream` is true",
        "content": {
            "application/json": {"schema": {"type": "object", "required": ["choices"]}},
            "text/event-stream": {"schema": {}},
        },
    }
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": ok, **{status: _error(text) for status, text in _ERRORS.items()}},
    }


def _get(name: str, summary: str, schema: dict[str, Any], errors: tuple[str, ...] = ()) -> dict[str, Any]:
    ok = {"description": summary, "content": {"application/json": {"schema": schema}}}
    responses: dict[str, Any] = {"200": ok, **{status: _error(_ERRORS[status]) for status in errors}}
    if name == "health":
        responses["503"] = {"description": "no", "content": {"application/json": {"schema": schema}}}
    return {"operationId": name, "summary": summary, "responses": responses}
