"""The launcher's control socket: one JSON object per line, asked by `dynamo status`, `stop` and `scale`.

    {"op": "status"} -> snapshot      {"op": "stop"} -> {"stopping": true}      {"op": "scale", "component": c, "replicas": n} -> what was done
Errors come back as {"error": {code, what, ...}}. The socket lies in the run directory (mode 0700).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
MOST_LINE = 1 << 20


async def serve(path: Path, handler: Handler) -> asyncio.Server:
    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, ValueError):
            while line := await reader.readline():
                try:
                    message = json.loads(line)
                    if not isinstance(message, dict):
                        raise TypeError("not a JSON object")
                    answer = await handler(message)
                except DynamoBlobError as e:
                    answer = {"error": e.as_json()}
                except Exception as e:  # whatever was sent, the launcher lives on
                    answer = {
                        "error": DynamoBlobError(
                            "CONTROL-INVALID", "the launcher does not understand", why=f"{type(e).__name__}: {e}"
                        ).as_json()
                    }
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(connection, str(path), limit=MOST_LINE)


def ask(path: Path, message: dict[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
    """One question. Raises CONTROL-UNREACHABLE, or the error the launcher answered with."""
    try:
        answer = asyncio.run(asyncio.wait_for(_ask(path, message), timeout_s))
    except (OSError, TimeoutError, ValueError) as e:
        raise DynamoBlobError(
            "CONTROL-UNREACHABLE", "the launcher does not answer", where=str(path), why=f"{type(e).__name__}: {e}"
        ) from None
    if "error" in answer:
        fields = dict(answer["error"])
        raise DynamoBlobError(fields.pop("code"), fields.pop("what"), **fields)
    return answer


async def _ask(path: Path, message: dict[str, Any]) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(str(path), limit=MOST_LINE)
    try:
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()
        answer = json.loads(await reader.readline())
        assert isinstance(answer, dict)
        return answer
    finally:
        writer.close()
