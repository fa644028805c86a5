"""Full disks, damaged files and odd words: the launcher goes on, or ends with a coded error; it never leaves processes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from components.common.errors import DynamoBlobError
from graphs.cli.main import main
from graphs.launch import proc, runs, store, supervisor
from graphs.launch.child import environment
from graphs.launch.table import View, render
from graphs.load import read_graph
from graphs.site import Release, Site
from tests.faults.launcher_stub import plan_of, stub
from tests.faults.test_launcher_supervision import ports, running, until

__all__ = ["ports"]
MOCK = str(runs.REPOSITORY / "graphs" / "mock.yaml")


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


async def test_a_full_disk_under_the_run_directory_ends_nothing(
    tmp_path: Path, ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(plan_of(tmp_path, stub("decode-0", ports[0], tmp_path, "--helper", kind="decode"))) as s:
        await asyncio.wait_for(s.ready.wait(), 20)
        pid = s.children["decode-0"].pid
        monkeypatch.setattr(supervisor, "write_json", full)
        s._note()
        assert s.snapshot()["phase"] == "serving" and s.failure is None
    assert pid is not None and proc.stat(pid) is None, "the drain went on without its notes"
    assert proc.members(tmp_path, s.sessions()) == []


async def test_a_run_directory_removed_while_serving_leaves_no_process(tmp_path: Path, ports: list[int]) -> None:
    import shutil

    run = tmp_path / "run"
    async with running(plan_of(run, stub("decode-0", ports[0], run, "--helper", kind="decode"))) as s:
        await asyncio.wait_for(s.ready.wait(), 20)
        session = s.children["decode-0"].popen.pid  # type: ignore[union-attr]
        shutil.rmtree(run)
    assert proc.session_members(session) == []


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", "[]", "null", '"x"', '{"launcher": 5}', '{"launcher": {"pid": 1}}', '{"launcher": {"pid": "x", "start": []}}',
        '{"sessions": ["a", null, {}]}', '{"sessions": 5}', '{"shm_files": [1, null, "../x"], "shm_dir": 5}', '{"phase": []}', "[" * 5000,
        '{"launcher": {"pid": -1, "start": 1}}', '{"launcher": {"pid": 1e999, "start": 1}}', "\udcff",
    ],
)  # fmt: skip
def test_a_damaged_state_file_is_swept_not_met(tmp_path: Path, text: str) -> None:
    run = tmp_path / "runs" / "20260101-000000-mock"
    (run / "credentials").mkdir(parents=True)
    (run / "state.json").write_bytes(text.encode(errors="surrogateescape"))
    os.utime(run, (1, 1))
    runs.sweep(tmp_path)
    assert runs.Run.read(run).closed and not (run / "credentials").exists()
    with pytest.raises(DynamoBlobError, match="LAUNCH-NOT-RUNNING"):
        runs.live_run(tmp_path)


def test_shared_memory_of_a_run_whose_notes_are_lost_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "20260101-000000-mock"
    run.mkdir(parents=True)
    (run / "state.json").write_text("{")
    os.utime(run, (1, 1))
    shm = Site(run=run, state=tmp_path).shm
    (shm / "cache" / "0").mkdir(parents=True)
    try:
        runs.sweep(tmp_path)
        assert not shm.exists()
    finally:
        runs._remove_tree(shm)


@pytest.mark.parametrize(
    "text", ["[]", "5", '{"tiny-full/1": 5}', '{"tiny-full/1": {}}', '{"tiny-full/1": {"manifest_digest": 5}}', "x"]
)
def test_a_damaged_record_of_releases_is_looked_up_again(tmp_path: Path, text: str) -> None:
    graph, site = read_graph(MOCK), Site(run=tmp_path / "r", state=tmp_path)
    store.record_path(site).parent.mkdir()
    store.record_path(site).write_text(text)
    assert store.known_release(graph, site) is None
    store.remember(graph, site, Release("1", "m", "w"))
    azurite_saved(site, "releases/tiny-full/1/manifest.sig", "approvals/tiny-full/1.json")
    assert store.known_release(graph, site) == Release("1", "m", "w")


def azurite_saved(site: Site, *names: str) -> None:
    """What Azurite's own databases would hold on disk."""
    for file in store.AZURITE_DATABASES:
        (site.state / "azurite" / file).write_text(json.dumps([{"name": n} for n in names], separators=(",", ":")))


def test_a_record_is_believed_once_azurite_has_saved_what_it_names(tmp_path: Path) -> None:
    """kill -9 within 5 s of publishing: Azurite comes back without the release, and every later start was refused."""
    graph, site = read_graph(MOCK), Site(run=tmp_path / "r", state=tmp_path)
    store.record_path(site).parent.mkdir()
    store.remember(graph, site, Release("1", "m", "w"))
    assert store.known_release(graph, site) is None
    azurite_saved(site, "releases/tiny-full/1/manifest.sig")
    assert store.known_release(graph, site) is None, "not approved yet"
    azurite_saved(site, "releases/tiny-full/1/manifest.sig", "approvals/tiny-full/1.json")
    assert store.known_release(graph, site) is not None
    os.utime(site.state / "azurite" / store.AZURITE_DATABASES[1], (1, 1))
    assert store.known_release(graph, site) is None, "the extents are older: reads would fail"


@pytest.mark.parametrize("words", ["[/tmp/x] failed", "[bold", "[red]x[/]", "\x1b[31mred"])
def test_words_of_a_process_are_shown_as_they_are(words: str) -> None:
    row = {
        "name": "decode-0",
        "state": "backing-off",
        "ready_after_s": None,
        "pid": 1,
        "ports": {},
        "restarts": 0,
        "why": words,
        "progress": "",
    }
    snapshot = {
        "graph": "g",
        "phase": "starting",
        "elapsed_s": 1.0,
        "model": "m",
        "release": {},
        "engine": "mock",
        "processes": [row],
    }
    view = View()
    view.console = Console(file=io.StringIO(), width=200)
    view.show(snapshot)
    view.say(words)
    view.console.print(render(snapshot))
    shown = view.console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count(words.replace("\x1b", "")) == 3


def verb(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"] if "--json" not in argv else list(argv)) == 1
    text = capsys.readouterr()
    assert "Traceback" not in text.err
    error: dict[str, Any] = json.loads(text.out)["error"]
    assert error["code"] != "CLI-FAULT", error
    return error


def a_file(path: Path) -> Path:
    path.write_text("x")
    return path


@pytest.mark.parametrize(
    "place", [lambda t: a_file(t / "file"), lambda t: a_file(t / "file") / "below", lambda t: Path("/proc/none")]
)
def test_a_state_directory_that_cannot_be_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: Callable[[Path], Path]
) -> None:
    state = place(tmp_path)
    error = verb(capsys, "serve", MOCK, "--quiet", "--state", str(state), "--json", "-")
    assert error["code"] == "LAUNCH-STATE-DIR" and str(state) in error["where"]


def test_a_json_file_that_cannot_be_written_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = verb(
        capsys, "serve", MOCK, "--quiet", "--state", str(tmp_path / "state"), "--json", str(tmp_path / "no" / "x.json")
    )
    assert error["code"] == "CLI-WRITE" and not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "what", ["prefill=²", "prefill=-1", "prefill", "=2", "prefill=", "prefill=1.5", "prefill=99999999999999999999"]
)
def test_scale_refuses_what_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    error = verb(capsys, "scale", what, "--state", str(tmp_path))
    assert error["code"] in ("CLI-ARGUMENT", "LAUNCH-NOT-RUNNING")


@pytest.mark.parametrize(
    "item",
    [
        "components.frontend.listen=127.0.0.1:99999",
        "components.frontend.listen=127.0.0.1:0",
        'components.prefill.env={A: "x\\0y"}',
    ],
)
def test_values_no_process_could_start_with_are_refused_at_their_place(
    capsys: pytest.CaptureFixture[str], item: str
) -> None:
    error = verb(capsys, "serve", MOCK, "--dry-run", "--set", item, "--json", "-")
    assert error["code"] == "GRAPH-WRONG-VALUE" and error["where"].startswith("--set components.")


@pytest.mark.parametrize("home", [None, "", "relative", "/nonexistent", "/etc/hostname"])
def test_a_home_that_nobody_can_write_to_is_replaced(tmp_path: Path, home: str | None) -> None:
    """HOME="" kept Dynamo's frontend from ever listing the model: the start hung to its deadline."""
    process = stub("dynamo-frontend-0", 1, tmp_path)
    base = {"PATH": "/bin", "LD_PRELOAD": "x", "HTTP_PROXY": "x"} | ({} if home is None else {"HOME": home})
    assert environment(process, base) == {"PATH": "/bin", "HOME": process.cwd, **process.env}
    assert environment(process, {"HOME": str(tmp_path)})["HOME"] == str(tmp_path)


def test_publishing_ends_when_the_graph_stops(tmp_path: Path) -> None:
    """A thread cannot be cancelled: Ctrl-C while a large model was hashed waited for its end."""
    from components.common.registry.progress import Meter

    said: list[str] = []
    stopped = threading.Event()
    meter = Meter("hash", 100, store._percent(said.append, stopped), every_s=0)
    meter.add(30)
    assert len(said) == 1
    stopped.set()
    with pytest.raises(DynamoBlobError, match="LAUNCH-STOPPED"):
        meter.add(1)


async def test_what_fails_after_the_wish_to_stop_is_no_failure(tmp_path: Path, ports: list[int]) -> None:
    async with running(plan_of(tmp_path, stub("decode-0", ports[0], tmp_path, kind="decode"))) as s:
        await asyncio.wait_for(s.ready.wait(), 20)
        assert not s.stopped.is_set()
        s.stop()
        s.fail(DynamoBlobError("X-Y", "the store went away while it was stopped"))
        assert s.stopped.is_set() and s.failure is None


async def test_nothing_starts_while_the_graph_drains(tmp_path: Path, ports: list[int]) -> None:
    """A dependency that became ready during the drain let the process that waited for it start."""
    gate = tmp_path / "gate"
    plan = plan_of(
        tmp_path, stub("azurite-0", ports[0], tmp_path, "--ready-when", str(gate), kind="azurite"), stub("weights-0", ports[1], tmp_path, after=("azurite-0",), kind="weights"),
        stub("decode-0", ports[2], tmp_path, "--drain", "1.5", kind="decode", drain_s=3.0),
    )  # fmt: skip
    async with running(plan) as s:
        await asyncio.wait_for(s.children["decode-0"].ready.wait(), 20)
        s.stop()
        gate.touch()
        await until(lambda: s.children["azurite-0"].ready.is_set() or s.phase == "drained")
        assert s.children["azurite-0"].ready.is_set()
        await until(lambda: s.phase == "drained")
        assert s.children["weights-0"].starts == 0


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"config.json": "{"}, "config.json: it cannot be read as JSON"), ({"config.json": "[]"}, "config.json: it holds no JSON object"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}', "m-1.safetensors": ""}, "1 files that are not there: m-2.safetensors"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": 5}}'}, "weight_map is no mapping"),
        ({"model.safetensors.index.json": "[" * 5000}, "cannot be read as JSON"),
    ],
)  # fmt: skip
def test_half_a_model_is_not_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], why: str
) -> None:
    """An index that names a missing shard was published and approved, and its version could never be mended."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    error = verb(capsys, "publish", str(tmp_path), "half", "1", "--state", str(tmp_path / "state"))
    assert error["code"] == "RELEASE-SOURCE" and why in error["why"]
    assert not (tmp_path / "state").exists()


def test_a_full_disk_is_named_when_the_store_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, other = DynamoBlobError("STORAGE-TIMEOUT", "no answer"), DynamoBlobError("RELEASE-SOURCE", "no model")
    assert runs.full_disk(tmp_path, silent) is None
    monkeypatch.setattr(runs, "FULL_BYTES", 1 << 62)
    named = runs.full_disk(tmp_path, silent)
    assert named is not None and named.code == "LAUNCH-DISK-FULL" and "STORAGE-TIMEOUT" in named.why
    assert runs.full_disk(tmp_path, other) is None


def test_a_users_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With HTTP_PROXY set, `dynamo serve` could not publish into its own store."""
    from requests.utils import should_bypass_proxies

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "example.org")
    assert not should_bypass_proxies("http://127.0.0.1:8104/x", None)
    assert main(["version"]) == 0
    assert should_bypass_proxies("http://127.0.0.1:8104/x", None) and should_bypass_proxies("http://example.org/", None)
    assert not should_bypass_proxies("http://elsewhere.org/", None)


def test_logs_prints_as_many_lines_as_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "runs" / "20260101-000000-mock" / "logs"
    logs.mkdir(parents=True)
    (logs / "decode-0.log").write_text("a\nb\nc\n")
    for lines, shown in ((0, []), (2, ["b", "c"]), (9, ["a", "b", "c"])):
        assert main(["logs", "--state", str(tmp_path), "--lines", str(lines), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"decode-0": shown}
    assert verb(capsys, "logs", "--state", str(tmp_path), "--lines", "-5")["code"] == "CLI-ARGUMENT"
    (tmp_path / "runs" / "dry-run-mock" / "logs").mkdir(
        parents=True
    )  # processes that were started by hand log elsewhere
    assert verb(capsys, "logs", "nope", "--state", str(tmp_path))["code"] == "LAUNCH-NO-LOG"


@pytest.mark.parametrize("smoke", [(), ("--smoke", "hello")])
def test_a_start_that_fails_prints_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], smoke: tuple[str, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"components.frontend.listen=127.0.0.1:{taken.getsockname()[1]}"
        code = main(["serve", MOCK, "--quiet", "--state", str(tmp_path), "--set", listen, "--json", "-", *smoke])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert code == 1 and (found["failed"][0] if smoke else found["error"])["code"] == "LAUNCH-PORT-TAKEN"
    assert err.startswith("LAUNCH-PORT-TAKEN: ")
