"""Why there are no hits, in words: from the tier's own status file to the lines of `dynamo status`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.common.kv import explain
from graphs.cli.status import kv_lines, tiers
from tests.kvtools.fixtures import names, stored
from tests.kvtools.proxy import wait_for


def said(scheduler: Any, path: Path) -> dict[str, Any]:
    """The status file after it was written anew."""
    scheduler.tier._status_due = 0.0
    scheduler.step()
    (found,) = explain.read(str(path))
    return found


@pytest.mark.parametrize("change", ["weights_digest", "dtype", "layout", "tokens_per_chunk", "group"])
def test_another_namespace_on_the_same_store(make, tmp_path, change: str) -> None:
    """Two releases under one name, another dtype, layout, chunk size or cache group: zero hits, and the field is named."""
    writer = make()
    stored(writer, names(3))
    values = {
        "weights_digest": "cd" * 32,
        "dtype": "bfloat16",
        "layout": "BLHNC",
        "tokens_per_chunk": 256,
        "group": "1; x",
    }
    mine = writer.tier.namespaces[0].model_copy(update={change: values[change]})
    reader = make(
        status_file=str(tmp_path / "kv.json"), **({"weights_digest": "cd" * 32} if change == "weights_digest" else {})
    )
    reader.tier.namespaces[0], reader.tier._digests[0] = mine, mine.digest()
    reader.tier._opened.note._mine[0] = mine
    reader.tier._opened.note.look()
    assert reader.hit(reader.request(chunks=names(3)), names(3)) == 0
    status = said(reader, tmp_path / "kv.json")
    assert explain.hits(status) == 0
    assert any(change in why for why in explain.why_no_hits(status)), explain.why_no_hits(status)
    (line, *whys) = kv_lines({"prefill-0": [status | {"hits": 0, "why": explain.why_no_hits(status)}]})
    assert line.plain.startswith("kv prefill-0 blob: 0 chunks hit, 3 missed (absent 3)") or "0 chunks hit" in line.plain
    assert any("why no hits" in w.plain and change in w.plain for w in whys)


def test_hits_need_no_reason(make, tmp_path) -> None:
    chunks = names(3)
    stored(make(), chunks)
    reader = make(status_file=str(tmp_path / "kv.json"))
    assert reader.hit(reader.request(chunks=chunks), chunks) == 3
    status = said(reader, tmp_path / "kv.json")
    assert explain.hits(status) == 3 and explain.why_no_hits(status) == []
    assert "3 chunks hit" in explain.summary(status) and "breaker closed" in explain.summary(status)


def test_store_down_is_said(make, proxy, tmp_path) -> None:
    reader = make(status_file=str(tmp_path / "kv.json"), breaker_errors=1, lookup_deadline_s=0.3, breaker_open_s=60.0)
    proxy.fault("hang")
    request = reader.request(chunks=names(2))
    assert reader.hit(request, names(2)) == 0
    wait_for(lambda: not reader.tier._opened.transport("default").available(False), 20, "the breaker opens")
    status = said(reader, tmp_path / "kv.json")
    assert any("reads are off" in why for why in explain.why_no_hits(status)), status
    assert "breaker OPEN for read" in explain.summary(status)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"ends": 3}', '{"ends": {}, "misses": [], "stores": {}, "transport": {}}']
)
def test_an_unreadable_file_is_no_status(tmp_path, text: str) -> None:
    (tmp_path / "kv.json").write_text(text)
    assert explain.read(str(tmp_path / "kv.json")) == []
    assert explain.read("") == []


def test_status_finds_the_workers_files(tmp_path) -> None:
    from graphs.plan import Plan

    status = {"store": "blob", "ends": {"load_ok": 2}, "misses": {"absent": 1}, "stores": {}, "transport": {}}
    (tmp_path / "p.json").write_text(json.dumps(status))
    plan = json.loads(_plan())
    for process in plan["processes"]:
        if process["component"] in ("prefill", "decode"):
            process["config"]["kv"] = {"settings": {"status_file": str(tmp_path / f"{process['name'][0]}.json")}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    Plan.read(tmp_path / "plan.json")
    found = tiers(tmp_path / "plan.json")
    assert found["prefill-0"][0]["hits"] == 2 and found["decode-0"] == []
    assert [t.plain for t in kv_lines(found)] == [
        "kv prefill-0 blob: 2 chunks hit, 1 missed (absent 1), 0 stored; breaker closed",
        "kv decode-0: nothing said yet",
    ]
    assert tiers(tmp_path / "none.json") == {}


def _plan() -> str:
    import contextlib
    import io

    from graphs.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["plan", "graphs/mock.yaml", "--json"])
    return out.getvalue()
