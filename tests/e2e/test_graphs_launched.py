"""The launched mock graph against its plan: argv and environment from /proc, sockets, scaling, stopping. (P1, issue of the launcher)"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from graphs.cli.main import main
from graphs.env import PASSED
from graphs.launch import runs
from graphs.launch.preflight import port_taken
from graphs.sockets import socket_directory
from tests.e2e.mockgraph import ROOT, Served, serving, until

pytestmark = pytest.mark.slow

# Where a running process may differ from its plan, and why. Anything else fails.
EXPLAINED = {
    "azurite": "becomes Azurite by exec: argv is node's, the account keys join its environment",
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("mock", tmp_path_factory.mktemp("m") / "state", "components.prefill.replicas=2") as served:
        yield served


def argv_of(pid: int) -> tuple[str, ...]:
    return tuple(Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0"))


def environ_of(pid: int) -> dict[str, str]:
    return dict(
        x.split("=", 1) for x in Path(f"/proc/{pid}/environ").read_bytes().decode().rstrip("\0").split("\0") if "=" in x
    )


def test_every_process_runs_with_exactly_the_planned_argv_and_environment(graph: Served) -> None:
    """Case 48: a deployment lacked the configuration that `serve` used."""
    pids = {p["name"]: p["pid"] for p in graph.status()["processes"]}
    assert set(pids) == {p.name for p in graph.plan.processes}
    for process in graph.plan.processes:
        pid = pids[process.name]
        assert os.readlink(f"/proc/{pid}/cwd") == process.cwd
        if process.component in EXPLAINED:
            continue
        assert argv_of(pid) == process.argv, process.name
        found = environ_of(pid)
        passed = {k: os.environ[k] for k in PASSED if k in os.environ}
        assert found == {**passed, **process.env}, process.name
        if process.config is not None:
            assert yaml.safe_load(Path(process.config_path).read_text()) == process.config


def test_the_explained_difference_is_only_what_it_says(graph: Served) -> None:
    pid = graph.row("azurite-0")["pid"]
    planned = next(p for p in graph.plan.processes if p.name == "azurite-0")
    extra = environ_of(pid).keys() - planned.env.keys() - set(PASSED)
    assert extra == {"AZURITE_ACCOUNTS", "DYNAMO_BLOB_ACCESS_LOG", "NO_UPDATE_NOTIFIER"}
    assert not any("key" in a.lower() and "==" in a for a in argv_of(pid)), "a key in argv is readable by everyone"


def test_no_socket_beyond_loopback(graph: Served) -> None:
    allowed = {e["component"] for e in yaml.safe_load((ROOT / "tests/e2e/sockets.yaml").read_text())["exceptions"]}
    graph.chat("wake every connection")
    listening = graph.listening()
    assert len(listening) >= len(graph.plan.processes), "the walk found the processes"
    assert [s for s in listening if not s[1].startswith("127.") and s[0].rpartition("-")[0] not in allowed] == []
    planned = {port.number for p in graph.plan.processes for port in p.ports}
    assert planned <= {port for _, _, port in listening}, "every planned port is really there"


def test_ready_means_an_answer(graph: Served) -> None:
    """Case 45."""
    assert graph.status()["phase"] == "serving"
    status, body = graph.chat("hello")
    assert status == 200 and body["choices"][0]["message"]["content"]


def test_status_logs_and_json_verbs(graph: Served, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state", str(graph.state)]
    assert main(["status", *state]) == 0
    table = capsys.readouterr().out
    assert "fake engine" in table and "prefill-1" in table
    assert main(["status", "--json", *state]) == 0
    assert '"phase": "serving"' in capsys.readouterr().out
    assert main(["logs", "frontend", "--lines", "3", *state]) == 0
    assert "frontend-0" in capsys.readouterr().out
    assert main(["logs", "nobody", *state]) == 1


def test_a_second_graph_on_the_same_store_is_refused(graph: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(ROOT / "graphs/mock.yaml"), "--state", str(graph.state), "--quiet"]) == 1
    assert "LAUNCH-STORE-BUSY" in capsys.readouterr().err


def test_a_second_graph_on_the_same_ports_is_refused_and_told_who_holds_them(
    graph: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listen = f"components.frontend.listen=127.0.0.1:{graph.port}"
    assert main(["serve", str(ROOT / "graphs/mock.yaml"), "--state", str(tmp_path), "--quiet", "--set", listen]) == 1
    err = capsys.readouterr().err
    assert "LAUNCH-PORT-TAKEN" in err and f"pid {graph.row('frontend-0')['pid']}" in err


def test_scale_while_it_serves(graph: Served, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p["name"]: p["pid"] for p in graph.status()["processes"]}
    assert main(["scale", "decode=2", "--state", str(graph.state)]) == 0
    until(lambda: graph.row("decode-1")["state"] == "ready", what="decode-1 ready")
    assert main(["scale", "decode=1", "--state", str(graph.state)]) == 0
    after = {p["name"]: p["pid"] for p in graph.status()["processes"]}
    assert after == before
    assert graph.chat("still here")[0] == 200
    for what in ("decode=0", "gateway=2", "decode"):
        assert main(["scale", what, "--state", str(graph.state)]) == 1
    assert graph.status()["phase"] == "serving"


def test_check_live_finds_the_rights_sufficient_and_no_wider(graph: Served, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["check", "--live", str(ROOT / "graphs/mock.yaml"), "--state", str(graph.state)]
    for item in (
        f"network.base_port={graph.plan.processes[0].ports[0].number - 4}",
        "kv={profile: tiny-cpu}",
        "engine.profile=tiny-cpu",
        "engine.kind=vllm",
    ):
        args += ["--set", item]
    assert main([*args, "--json"]) == 0, capsys.readouterr().out
    measured = capsys.readouterr().out
    assert "LIVE-RATE" in measured or "LIVE-SLOW" in measured
    assert "RIGHTS" not in measured
    serving_file = graph.run_dir / "credentials" / "serving.weights.json"
    good = serving_file.read_bytes()
    serving_file.write_bytes((graph.run_dir / "credentials" / "publisher.weights.json").read_bytes())
    try:
        assert main([*args, "--json"]) == 1
        assert "LIVE-RIGHTS-TOO-WIDE" in capsys.readouterr().out
    finally:
        serving_file.write_bytes(good)


def test_zz_stop_leaves_nothing(graph: Served) -> None:
    """Last in the module: processes, ports, sockets, shared memory, credentials are gone; the store's data stays."""
    plan, run_dir = graph.plan, graph.run_dir
    pids = [m.pid for m in graph.members()]
    assert main(["stop", "--state", str(graph.state)]) == 0
    assert graph.process.wait(30) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert all(port_taken(port.host, port.number) == "" for p in plan.processes for port in p.ports)
    assert runs.Run.read(run_dir).closed
    assert not any((run_dir / name).exists() for name in ("credentials", "discovery", "cwd"))
    assert not socket_directory(run_dir).exists()
    assert not Path(plan.shm_dir).exists()
    assert (graph.state / "azurite").is_dir()
