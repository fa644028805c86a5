"""Is a process ready, and if not, why?"""

from __future__ import annotations

import asyncio
import json

from graphs.launch.http import Answer, ask
from graphs.plan import Probe


async def check(probe: Probe | None) -> str:
    """Empty when ready, else the reason in a few words."""
    return (await look(probe))[1]


async def look(probe: Probe | None) -> tuple[bool, str]:
    """(whether anything was answered, the reason why it is not ready; empty when it is).

    That a connection is accepted is no answer: the kernel does it, also for a process that is stopped."""
    if probe is None:
        return True, ""
    timeout_s = probe.timeout_s
    try:
        if probe.zmtp:
            async with asyncio.timeout(timeout_s):
                return True, await _greeting(probe.zmtp)
        answer = await ask(probe.answers or probe.http or probe.unix_http or probe.model, timeout_s=timeout_s)
    except TimeoutError:
        return False, f"no answer in {timeout_s:g} s"
    except (FileNotFoundError, ConnectionRefusedError):
        return False, "not listening yet"
    except (OSError, ValueError, EOFError, IndexError, asyncio.LimitOverrunError) as e:
        return False, f"{type(e).__name__}: {e}"[:120]
    if probe.answers:
        return True, ""
    if answer.status != 200:
        return True, reason(answer)
    if probe.model:
        try:
            names = [m["id"] for m in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return True, "no model list"
        return True, "" if probe.expect in names else f"'{probe.expect}' is not listed"
    return True, ""


async def _greeting(address: str) -> str:
    """Every ZeroMQ peer speaks first: ten bytes, 0xFF ... 0x7F."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        said = await reader.readexactly(10)
    finally:
        writer.close()
    return "" if (said[0], said[-1]) == (0xFF, 0x7F) else "what listens there is not ZeroMQ"


def reason(answer: Answer) -> str:
    """What a component says about itself in a non-200 health answer."""
    try:
        body = json.loads(answer.body)
    except ValueError:
        text = answer.body.decode(errors="replace").strip().splitlines()
        return f"HTTP {answer.status}" + (f": {text[0][:100]}" if text else "")
    if isinstance(body, dict):
        inner = body.get("error") if isinstance(body.get("error"), dict) else body
        assert isinstance(inner, dict)
        for key in ("why", "reason", "message", "what", "status"):
            if isinstance(inner.get(key), str) and inner[key]:
                return str(inner[key])[:120]
    return f"HTTP {answer.status}"
