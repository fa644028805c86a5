"""Every fault of the store ends in a verified load or a clear refusal, within its deadline (P2, P7)."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from components.common.errors import DynamoBlobError
from components.common.loading.config import WeightsConfig
from components.common.loading.report import Report
from components.common.loading.session import open_session
from components.common.registry.manifest import Manifest
from components.common.storage.config import AccountConfig
from tests.faults import stores
from tests.faults.proxy import FaultProxy, Rule
from tests.faults.releases import digests, weights_config
from tests.faults.stores import OBJECTS, WANTED

release, proxy = stores.release, stores.proxy


def config(proxy: FaultProxy, tmp_path: Path, manifest: Manifest, **changes: Any) -> WeightsConfig:
    base = weights_config(proxy.url("standin"), tmp_path / "w", manifest, range_deadline_s=2.0, deadline_s=20.0)
    account = base.account.model_copy(update={"read_timeout_s": 1.0, "connect_timeout_s": 1.0})
    return base.model_copy(update={"account": account, **changes})


def load(config: WeightsConfig) -> dict[str, Any]:
    report = Report(config.report)
    with open_session(config, None, report) as session:
        assert digests(dict(session.tensors())) == WANTED
    return report.as_json()


SURVIVED = {
    "case 2: 503 three times, then fine": Rule("busy", OBJECTS, times=3),
    "429 with Retry-After": Rule("throttle", OBJECTS, times=2, seconds=1),
    "latency": Rule("delay", OBJECTS, seconds=0.2, chance=0.3),
    "narrow link": Rule("cap", OBJECTS, rate=4_000_000),
    "one stall": Rule("stall", OBJECTS, after=1000, times=1),
    "stall before the first byte": Rule("stall", OBJECTS, after=0, times=1),
    "cut in the middle": Rule("cut", OBJECTS, after=100_000, times=2),
    "reset at once": Rule("reset", OBJECTS, after=-1, times=2),
    "reset in the middle": Rule("reset", OBJECTS, after=70_000, times=2),
    "not HTTP": Rule("garbage", OBJECTS, times=2),
    "one bit on the way": Rule("flip", OBJECTS, after=-1, times=1),
    "one short answer": Rule("truncate", OBJECTS, by=3, times=1),
    "zeros once": Rule("zero", OBJECTS, times=1),
    "500 once": Rule("status", OBJECTS, status=500, times=1),
    "token expired once, renewed": Rule("expired", OBJECTS, times=1),
    "manifest: 503 twice": Rule("busy", "manifest.json", times=1),
    "manifest: connection reset once": Rule("reset", "manifest.json", after=-1, times=1),
    "everything a little": Rule("busy", OBJECTS, chance=0.2),
}


@pytest.mark.parametrize("name", SURVIVED)
def test_survived(proxy: FaultProxy, tmp_path: Path, release: tuple[Path, Manifest], name: str) -> None:
    rule = SURVIVED[name]
    c = config(proxy, tmp_path, release[1], range_retries=8)
    if rule.kind == "expired":
        renewed = json.loads(Path(c.account.credential.path).read_text())
        proxy.rules = [Rule("delay", OBJECTS, seconds=0.0)]
        original = proxy._answer_alone

        def renew(*args: Any) -> bool:  # the issuer writes a new token just before the old one is refused
            Path(c.account.credential.path).write_text(json.dumps({**renewed, "sas": "sv=1&sig=fresh"}))
            return original(*args)

        proxy._answer_alone = renew  # type: ignore[method-assign]
    proxy.rules = [rule]
    began = time.monotonic()
    report = load(c)
    assert time.monotonic() - began < 20
    assert sum(proxy.faults.values()) > 0, "the fault happened"
    if rule.match == OBJECTS and rule.kind not in ("delay", "cap", "expired"):
        assert report["retries"] >= 1, "and was counted"


REFUSED = {
    "503 for ever": (Rule("busy", OBJECTS), "STORAGE-BUSY"),
    "stalls for ever": (Rule("stall", OBJECTS, after=5000), "STORAGE-TIMEOUT"),
    "resets for ever": (Rule("reset", OBJECTS, after=-1), "STORAGE-DISCONNECTED"),
    "expired token": (Rule("expired", OBJECTS), "STORAGE-UNAUTHENTICATED"),
    "no right": (Rule("forbidden", OBJECTS), "STORAGE-FORBIDDEN"),
    "object removed": (Rule("missing", OBJECTS), "STORAGE-NOT-FOUND"),
    "object truncated": (Rule("truncate", OBJECTS, by=1), "STORAGE-RANGE"),
    "bits flipped for ever": (Rule("flip", OBJECTS, after=77), "WEIGHTS-DIGEST-MISMATCH"),
    "zeros for ever": (Rule("zero", OBJECTS), "WEIGHTS-DIGEST-MISMATCH"),
    "version missing": (Rule("missing", r"releases/"), "REGISTRY-RELEASE-MISSING"),
    "manifest altered": (Rule("flip", r"manifest\.json", after=300), "REGISTRY-MANIFEST-"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(proxy: FaultProxy, tmp_path: Path, release: tuple[Path, Manifest], name: str) -> None:
    rule, code = REFUSED[name]
    proxy.rules = [rule]
    c = config(proxy, tmp_path, release[1], range_retries=2)
    began = time.monotonic()
    with pytest.raises(DynamoBlobError) as e:
        load(c)
    assert time.monotonic() - began < 15
    assert e.value.code.startswith(code), e.value
    assert e.value.where and "sig=" not in str(e.value)


def test_case_10_other_object_in_its_place_is_refused_with_both_digests(
    proxy: FaultProxy, tmp_path: Path, release: tuple[Path, Manifest]
) -> None:
    one, two = [f for f in release[1].files if f.path.endswith(".safetensors")]
    proxy.rules = [Rule("other", OBJECTS + one.blake3, target=f"/standin/weights/{two.blob}")]
    with pytest.raises(DynamoBlobError) as e:
        load(config(proxy, tmp_path, release[1]))
    assert e.value.code == "WEIGHTS-DIGEST-MISMATCH"
    assert (e.value.data["file"], e.value.data["expected"], e.value.data["found"]) == (
        one.path,
        one.ranges[e.value.data["range"]],
        two.ranges[e.value.data["range"]],
    )


def test_release_removed_between_resolve_and_load(
    proxy: FaultProxy, tmp_path: Path, release: tuple[Path, Manifest]
) -> None:
    c = config(proxy, tmp_path, release[1])
    with open_session(c, None, Report()) as session:
        proxy.rules = [Rule("missing", OBJECTS)]
        with pytest.raises(DynamoBlobError) as e:
            list(session.tensors())
    assert e.value.code == "STORAGE-NOT-FOUND"


@pytest.mark.parametrize(
    ("url", "code"),
    [("http://no-such-host.invalid/standin", "STORAGE-DNS"), ("http://127.0.0.1:9/standin", "STORAGE-REFUSED")],
)
def test_no_store_at_all(
    proxy: FaultProxy, tmp_path: Path, release: tuple[Path, Manifest], url: str, code: str
) -> None:
    c = config(proxy, tmp_path, release[1], on_outage="fail")
    c = c.model_copy(update={"account": AccountConfig(**{**c.account.model_dump(), "url": url, "retries": 0})})
    began = time.monotonic()
    with pytest.raises(DynamoBlobError) as e:
        load(c)
    assert e.value.code == "WEIGHTS-OUTAGE" and code in e.value.why
    assert time.monotonic() - began < 15


def test_case_06_eight_loaders_under_one_account_limit_all_finish(
    proxy: FaultProxy, tmp_path: Path, release: tuple[Path, Manifest]
) -> None:
    """The account refuses a third of all requests: nobody dies, nobody loads anything wrong."""
    proxy.rules = [Rule("busy", OBJECTS, chance=0.33)]
    configs = [config(proxy, tmp_path / str(i), release[1], range_retries=20, deadline_s=60.0) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(load, configs))
    assert sum(r["retries"] for r in reports) == proxy.faults["busy"] > 10
    assert all(r["verified_bytes"] for r in reports)


def test_load_deadline_holds_whatever_trickles(
    proxy: FaultProxy, tmp_path: Path, release: tuple[Path, Manifest]
) -> None:
    proxy.rules = [Rule("cap", OBJECTS, rate=20_000)]
    began = time.monotonic()
    with pytest.raises(DynamoBlobError) as e:
        load(config(proxy, tmp_path, release[1], deadline_s=3.0, range_deadline_s=60.0))
    assert e.value.code in ("WEIGHTS-DEADLINE", "STORAGE-TIMEOUT")
    assert time.monotonic() - began < 8
