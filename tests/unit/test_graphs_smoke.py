"""The smoke's verdict: each proof that is missing has its own code; nothing else is reported."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from graphs.counters import parse_metrics, total
from graphs.launch import store
from graphs.load import Finding
from graphs.smoke import findings
from tests.unit.test_graphs_plan import plan

GOOD: dict[str, Any] = {
    "answer": "Paris.",
    "weights": {
        "manifest_bytes": 100, "verified_bytes": 100, "store_bytes": 180,
        "workers": {n: {"manifest_bytes": 100, "verified_bytes": 100, "bytes_by_source": {"blob": 90, "local_small_files": 10}} for n in ("prefill-0", "decode-0")},
    },
    "kv": {
        "nixl_bytes": 4096, "nixl_failed_transfers": 0, "prefill_pid": 1, "decode_pid": 2, "decode_prefilled_tokens": 1, "decode_requests": 1, "decode_worker": "decode-0",
    },
    "router": {"named": 7, "served": 7, "named_worker": "", "served_worker": "", "pin": "pinned"},
}  # fmt: skip


def verdict(*changes: tuple[str, Any]) -> list[Finding]:
    result = copy.deepcopy(GOOD)
    for dotted, value in changes:
        *path, last = dotted.split(".")
        node = result
        for key in path:
            node = node[key]
        node[last] = value
    return findings(plan("disagg"), result)


def test_a_proven_answer_has_no_finding() -> None:
    assert verdict() == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("answer", " \n"), "SMOKE-EMPTY-ANSWER"),
        (("weights.workers.decode-0.verified_bytes", 99), "WEIGHTS-UNPROVEN"),
        (("weights.workers.prefill-0.manifest_bytes", None), "WEIGHTS-UNPROVEN"),
        (("weights.store_bytes", 89), "WEIGHTS-STORE-UNPROVEN"),
        (("kv.nixl_bytes", 0), "KV-HANDOVER-RECOMPUTED"),
        (("kv.nixl_failed_transfers", 1), "KV-HANDOVER-RECOMPUTED"),
        (("kv.decode_prefilled_tokens", 38), "KV-HANDOVER-RECOMPUTED"),
        (("kv.decode_pid", 1), "SMOKE-ONE-PROCESS"),
        (("kv.prefill_pid", None), "SMOKE-ONE-PROCESS"),
        (("router.named", None), "ROUTER-NOT-HONOURED"),
        (("router.served", 8), "ROUTER-NOT-HONOURED"),
    ],
    ids=lambda x: f"{x[0]}={x[1]}" if isinstance(x, tuple) else "",
)
def test_a_missing_proof_has_its_own_code(change: tuple[str, Any], code: str) -> None:
    assert [f.code for f in verdict(change)] == [code]


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP x y\nvllm:a_total{source="local_compute",engine="0"} 3.0\nvllm:a_total{source="external_kv_transfer"} 5\nvllm:a_total_created 1\nb NaN\nc +Inf\nbroken line\n'
    counted = parse_metrics(text)
    assert total(counted, "vllm:a_total", source="local_compute") == 3.0
    assert total(counted, "vllm:a_total") == 8.0
    assert total(counted, "missing") == 0.0


def test_what_publishing_read_is_not_counted_as_serving(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    rows = [
        ("GET", "/dbweights/weights/objects/a", 100),
        ("PUT", "/dbweights/weights/objects/b", 7),
        ("GET", "/dbweights/weights/objects/a", 40),
        ("GET", "/dbkv/kv/x", 9),
    ]
    store.access_log(tmp_path).write_text(
        "".join(json.dumps({"method": m, "path": p, "body": b}) + "\n" for m, p, b in rows) + '{"method": "GET", "pa'
    )
    assert store.sent_since(tmp_path, 0, "/objects/") == 140
    assert store.sent_since(tmp_path, 2, "/objects/") == 40
