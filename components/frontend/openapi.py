"""The gateway's OpenAPI description, served at /openapi.json."""

from __future__ import annotations

import json

from components.frontend.config import GatewayConfig


def description(config: GatewayConfig) -> bytes:
    return json.dumps(
        {"openapi": "3.1.0", "info": {"title": "dynamo-blob gateway", "version": "0.1.0"}, "paths": {}}
    ).encode()
