"""Is a process ready, and if not, why?"""

from __future__ import annotations

import asyncio
import json

from graphs.launch.http import Answer, ask
from graphs.plan import Probe


async def check(probe: Probe | None) -> str:
    """Empty when ready, else the reason in a few words."""
    if probe is None:
        return ""
    timeout_s = probe.timeout_s
    url = probe.http or probe.unix_http or probe.model
    try:
        if probe.tcp:
            host, _, port = probe.tcp.rpartition(":")
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            return ""
        answer = await ask(url, timeout_s=timeout_s)
    except TimeoutError:
        return f"no answer in {timeout_s:g} s"
    except (FileNotFoundError, ConnectionRefusedError):
        return "not listening yet"
    except (OSError, ValueError, EOFError, IndexError, asyncio.LimitOverrunError) as e:
        return f"{type(e).__name__}: {e}"[:120]
    if answer.status != 200:
        return reason(answer)
    if probe.model:
        try:
            names = [m["id"] for m in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return "no model list"
        return "" if probe.expect in names else f"'{probe.expect}' is not listed"
    return ""


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
