"""Case 2: a store that refuses three times and then serves costs three counted retries, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.loading.report import Report
from components.common.loading.session import open_session
from components.common.registry.manifest import Manifest
from tests.faults import stores
from tests.faults.proxy import FaultProxy, Rule
from tests.faults.releases import digests, weights_config
from tests.faults.stores import OBJECTS, WANTED

release, proxy = stores.release, stores.proxy


@pytest.mark.parametrize("in_flight", [1, 8], ids=["one_range_three_times", "three_ranges_at_once"])
def test_case_02_three_times_503_then_fine_is_three_retries_and_the_right_bytes(
    proxy: FaultProxy, tmp_path: Path, release: tuple[Path, Manifest], in_flight: int
) -> None:
    proxy.rules = [Rule("busy", OBJECTS, times=3)]
    config = weights_config(proxy.url("standin"), tmp_path / "w", release[1], range_in_flight=in_flight)
    report = Report()
    with open_session(config, None, report) as session:
        assert digests(dict(session.tensors())) == WANTED
    found = report.as_json()
    refused = [e for e in proxy.entries if e["fault"] == "busy"]
    assert len(refused) == proxy.faults["busy"] == 3 and {e["status"] for e in refused} == {503}
    if in_flight == 1:
        assert len({(e["target"], e["range"]) for e in refused}) == 1, "the case as reported: one range, three times"
    assert found["retries"] == found["error.STORAGE-BUSY"] == 3, "each refusal is counted, once"
    weights = [f for f in release[1].files if f.path.endswith(".safetensors")]
    served = {f.path: proxy.by_target[f"/standin/weights/{f.blob}"] for f in weights}
    assert served == {f.path: f.size for f in weights}, "what was not refused is not read again"
    asked = [e for e in proxy.entries if "/objects/" in e["target"]]
    assert len(asked) == sum(len(f.ranges) for f in weights) + 3, "and nothing was asked behind the counter's back"
