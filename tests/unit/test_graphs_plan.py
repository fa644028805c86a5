"""The plan: stable, diffable, complete; golden plans of every shipped graph."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from graphs.cli.main import main
from graphs.compile import compile_plan
from graphs.launch.byhand import as_shell
from graphs.load import read_graph
from graphs.plan import Plan
from graphs.plandiff import diff, normal
from graphs.site import Release, Site

ROOT = Path(__file__).resolve().parents[2]
GRAPHS = sorted((ROOT / "graphs").glob("*.yaml"))
GOLDEN = ROOT / "tests" / "golden" / "plans"
SITE = Site(
    run=Path("/s/runs/r"),
    state=Path("/s"),
    python="python3",
    release=Release("1", "a" * 64, "b" * 64, ("c" * 64,), ("d" * 64,)),
)


def plan(name: str, *sets: str, site: Site = SITE) -> Plan:
    return compile_plan(read_graph(ROOT / "graphs" / f"{name}.yaml", sets), site)


def portable(p: Plan) -> str:
    """The plan without what this machine adds: its place on disk, library paths."""
    data = normal(p)
    for process in data["processes"].values():
        process["env"].pop("LD_PRELOAD", None)
    return json.dumps(data, indent=1, sort_keys=True).replace(str(ROOT), "<checkout>") + "\n"


@pytest.mark.parametrize("path", GRAPHS, ids=lambda p: p.stem)
def test_golden_plan_of_every_shipped_graph(path: Path) -> None:
    """After a change that is meant: DYNAMO_BLOB_GOLDEN=write pytest tests/unit/test_graphs_plan.py, and read the diff."""
    golden, text = GOLDEN / f"{path.stem}.json", portable(plan(path.stem))
    if os.environ.get("DYNAMO_BLOB_GOLDEN") == "write":
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_the_same_graph_gives_the_same_plan_wherever_it_runs() -> None:
    other = Site(run=Path("/elsewhere/runs/x"), state=Path("/elsewhere"), python="python3", release=SITE.release)
    assert plan("disagg").model_dump_json() == plan("disagg").model_dump_json()
    assert diff(plan("disagg"), plan("disagg", site=other)) == []


def test_a_diff_names_the_field() -> None:
    changes = diff(plan("disagg"), plan("disagg", "components.decode.engine.block_size=64"))
    assert ("processes.decode-0.config.engine.block_size", 128, 64) in changes
    assert not [c for c in changes if c.path.startswith("processes.prefill-0")]


def test_scaling_moves_no_port_of_another_process() -> None:
    before, after = plan("disagg"), plan("disagg", "components.prefill.replicas=3")
    ports = {p.name: [x.number for x in p.ports] for p in after.processes}
    assert all(ports[p.name] == [x.number for x in p.ports] for p in before.processes)
    numbers = [n for own in ports.values() for n in own]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("path", GRAPHS, ids=lambda p: p.stem)
def test_a_plan_holds_no_secret_and_only_loopback(path: Path) -> None:
    p = plan(path.stem)
    text = p.model_dump_json()
    assert "AccountKey" not in text and "sig=" not in text and "AZURITE_ACCOUNTS" not in text
    assert {port.host for x in p.processes for port in x.ports} == {"127.0.0.1"}
    for x in p.processes:
        if x.component in ("prefill", "decode", "aggregated", "router", "dynamo-frontend"):
            assert {
                x.env[k]
                for k in ("DYN_SYSTEM_HOST", "DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
            } == {"127.0.0.1"}
            if p.discovery == "file":
                assert x.env["DYN_FILE_KV"].startswith(p.run_dir), "discovery of another run names dead workers"
        assert x.cwd.startswith(p.run_dir)
        assert x.grace_s > x.drain_s


def test_workers_of_one_machine_share_nothing_they_must_not() -> None:
    p = plan("disagg-2p2d")
    workers = [x for x in p.processes if x.component in ("prefill", "decode")]
    for key in ("VLLM_NIXL_SIDE_CHANNEL_PORT", "DYN_SYSTEM_PORT"):
        assert len({w.env[key] for w in workers}) == len(workers) == 4
    assert len({w.env["PYTHONHASHSEED"] for w in workers}) == 1


def test_dry_run_prints_every_argument_and_variable() -> None:
    p = plan("disagg")
    text = as_shell(p)
    for x in p.processes:
        assert all(f"{k}={v}" in text.replace("'", "") for k, v in x.env.items())
        assert " ".join(x.argv) in text
    assert "env -i " in text


def test_a_dry_run_writes_what_its_commands_read_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run by hand, the printed commands ended with STORAGE-CREDENTIAL-UNREADABLE: nobody had made keys and credentials."""
    for options in ([], ["--json"]):
        assert main(["serve", str(ROOT / "graphs" / "mock.yaml"), "--state", str(tmp_path), "--dry-run", *options]) == 0
        text = capsys.readouterr().out
        made = Plan.model_validate_json(text) if options else made_by(text)
        secrets = {Path(s) for p in made.processes for s in p.secrets}
        assert secrets and all(s.stat().st_mode & 0o777 == 0o600 for s in secrets)
        assert {s.parent.stat().st_mode & 0o777 for s in secrets} == {0o700}
        assert not [s for s in secrets if s.read_text().strip() in text], "a secret was printed"
        config = next(p for p in made.processes if p.component == "weights").config
        assert config is not None and config["weights"]["trust"]["require"] == "approval", "as `serve` would"
        assert not (tmp_path / "azurite").exists(), "nothing was started"


def made_by(script: str) -> Plan:
    """The plan whose processes a script starts: valid shell, and what it needs before the weight service stands there."""
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    order = [
        script.index(x)
        for x in ("components.common.storage.azurite", "-m graphs.launch.byhand", "-m components.weights")
    ]
    assert order == sorted(order) and "kill $(jobs -p)" in script and "mode 0600" in script
    state = Path(script.split("exec 9>>")[1].split("/azurite.lock")[0])
    return plan("mock", site=Site(run=state / "runs" / "dry-run-mock", state=state, release=SITE.release))
