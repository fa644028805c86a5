"""The control socket: whatever is sent, the launcher lives on and answers in JSON; scales come one after the other."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from components.common.errors import DynamoBlobError
from graphs.launch import control
from graphs.launch.session import Session
from graphs.launch.table import View

MOCK = Path(__file__).resolve().parents[2] / "graphs" / "mock.yaml"


class Recorded(Session):
    """A session whose scaling takes its time and is watched."""

    def __init__(self, state: Path) -> None:
        super().__init__(str(MOCK), [], state, View(quiet=True))
        self.supervisor = object()  # type: ignore[assignment]  # present; nothing here uses it
        self.gate, self.first, self.running, self.most = asyncio.Event(), asyncio.Event(), 0, 0

    async def _scale(self, component: str, replicas: int) -> dict[str, Any]:
        self.running += 1
        self.most = max(self.most, self.running)
        self.first.set()
        await self.gate.wait()
        self.running -= 1
        return {"started": [f"{component}-{replicas}"], "drained": []}


async def exchange(socket: Path, *lines: bytes) -> list[dict[str, Any]]:
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        for line in lines:
            writer.write(line + b"\n")
        writer.write_eof()
        return [json.loads(x) for x in (await asyncio.wait_for(reader.read(), 20)).splitlines()]
    finally:
        writer.close()


ODD = [
    b"[]", b"5", b"null", b'"x"', b"{", b"", b"\xff\xfe", b"{}", b'{"op": 5}', b'{"op": "scale"}', b'{"op": []}', b"[" * 5000,
    b'{"op": "scale", "component": "prefill", "replicas": 1e999}', b'{"op": "scale", "component": {}, "replicas": "x"}',
    b'{"op": "scale", "component": "prefill", "replicas": null}',
]  # fmt: skip


@pytest.mark.parametrize("line", ODD)
async def test_an_odd_line_gets_a_coded_error_and_the_next_one_its_answer(tmp_path: Path, line: bytes) -> None:
    session = Recorded(tmp_path)
    session.gate.set()
    server = await control.serve(tmp_path / "c.sock", session._control)
    good = b'{"op": "scale", "component": "prefill", "replicas": 2}'
    odd, answer = await exchange(tmp_path / "c.sock", line, good)
    assert odd["error"]["code"] in ("CONTROL-INVALID", "CONTROL-UNKNOWN")
    assert answer["started"] == ["prefill-2"]
    server.close()


async def test_noise_never_ends_the_server(tmp_path: Path) -> None:
    session, pick = Recorded(tmp_path), random.Random(7)
    session.gate.set()
    server = await control.serve(tmp_path / "c.sock", session._control)
    for _ in range(100):
        noise = bytes(pick.randrange(256) for _ in range(pick.randrange(400))).replace(b"\n", b"")
        for answer in await exchange(tmp_path / "c.sock", noise):
            assert answer["error"]["code"].startswith("CONTROL-")
    with pytest.raises(DynamoBlobError, match="CONTROL-UNKNOWN"):
        await asyncio.to_thread(control.ask, tmp_path / "c.sock", {"op": "x"})
    server.close()


async def test_scales_come_one_after_the_other(tmp_path: Path) -> None:
    """A replica told to start while it still drained was in neither list afterwards."""
    session = Recorded(tmp_path)
    tasks = [
        asyncio.create_task(session._control({"op": "scale", "component": "prefill", "replicas": n})) for n in (1, 2, 3)
    ]
    await asyncio.wait_for(session.first.wait(), 10)
    session.gate.set()
    done = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert session.most == 1 and [d["started"] for d in done] == [["prefill-1"], ["prefill-2"], ["prefill-3"]]
