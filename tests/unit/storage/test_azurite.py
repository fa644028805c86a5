"""The embedded store: no secret in argv or logs, an access log that counts what really left, no orphan."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from components.common.errors import DynamoBlobError
from components.common.storage.azurite import AzuriteConfig, azurite_argv, log_records, served, wait_ready
from components.common.storage.sas import read_secret, write_secret
from tests.registry_store import REPOSITORY, Registry, free_port, prepare


def eventually(check: object, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not check():  # type: ignore[operator]
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def test_no_key_in_argv_and_none_in_the_log(registry: Registry) -> None:
    registry.publisher.create(registry.layout.container, "x", b"1")
    registry.serving.get(registry.layout.container, "x")
    key = read_secret(registry.store.root / "weights.key")
    argv = Path(f"/proc/{registry.store.process.pid}/cmdline").read_bytes()
    assert b"azurite" in argv and key.encode() not in argv
    assert registry.layout.container in registry.store.log.read_text()
    for text in (registry.store.log.read_text(), (registry.store.root / "out").read_text()):
        assert key not in text and "sig=" not in text


def test_access_log_counts_body_bytes(registry: Registry) -> None:
    c = registry.layout.container
    root = urlsplit(registry.store.config.url("weights"))
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(f"{root.scheme}://{root.netloc}/")  # as the launcher's probe does, every 2 s
    registry.publisher.create(c, "three-mb", os.urandom(3_000_000))
    registry.serving.get(c, "three-mb", 1_000_000, 500_000)
    registry.serving.get(c, "three-mb")
    eventually(lambda: served(registry.store.log, path_contains=f"{c}/three-mb") == 3_500_000)
    rows = [r for r in log_records(registry.store.log) if r["path"].endswith(f"{c}/three-mb") and r["method"] == "GET"]
    assert [r["body"] for r in rows] == [500_000, 3_000_000]
    assert rows[0]["range"] == "bytes=1000000-1499999"
    assert not [r for r in log_records(registry.store.log) if r["path"] == "/"], "probes are no use of the store"


def test_access_log_counts_a_cut_answer(registry: Registry) -> None:
    """A client that leaves after the first bytes is not billed for the whole body: the log tells length and bytes apart."""
    c, size = registry.layout.container, 48 * 2**20
    registry.publisher.create(c, "big", bytes(size))
    url, _ = registry.serving.credential.sign(registry.serving.uri(c, "big"))
    conn = http.client.HTTPConnection("127.0.0.1", registry.store.config.port)
    conn.request("GET", url.split(str(registry.store.config.port), 1)[1], headers={"x-ms-version": "2021-12-02"})
    answer = conn.getresponse()
    assert answer.status == 200 and len(answer.read(1000)) == 1000
    conn.close()
    answer.close()

    def logged() -> list[dict[str, object]]:
        return [r for r in log_records(registry.store.log) if r["path"].endswith(f"{c}/big") and r["method"] == "GET"]

    eventually(lambda: bool(logged()))
    assert logged()[0]["length"] == size and 0 < logged()[0]["body"] < size


def test_dies_with_its_parent(tmp_path: Path) -> None:
    config = prepare(tmp_path, in_memory=True)
    script = (
        "import subprocess, sys, time; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-m", "components.common.storage.azurite", "--plan", str(tmp_path / "plan.json")]
    parent = subprocess.Popen([sys.executable, "-c", script, *argv], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_ready(config, 60)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    eventually(
        lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3], 20
    )


def test_refuses_what_is_not_loopback(tmp_path: Path) -> None:
    with pytest.raises(DynamoBlobError, match="host"):
        AzuriteConfig.parse({"data_dir": "/x", "port": 1, "accounts": {}, "host": "0.0.0.0"})


def test_says_what_is_missing(tmp_path: Path) -> None:
    config = AzuriteConfig(data_dir=str(tmp_path), port=free_port(), accounts={}, node_modules=str(tmp_path))
    with pytest.raises(DynamoBlobError, match="STORAGE-NO-AZURITE") as caught:
        azurite_argv(config)
    assert "make install" in caught.value.do


def test_key_files_must_be_private(tmp_path: Path) -> None:
    write_secret(tmp_path / "k", "x")
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600
    (tmp_path / "k").chmod(0o644)
    with pytest.raises(DynamoBlobError, match="readable by others"):
        read_secret(tmp_path / "k")


def test_the_well_known_account_does_not_exist(registry: Registry) -> None:
    conn = http.client.HTTPConnection("127.0.0.1", registry.store.config.port)
    conn.request("GET", "/devstoreaccount1/?comp=list", headers={"x-ms-version": "2021-12-02"})
    assert conn.getresponse().status in (400, 403, 404)
    assert json.loads(json.dumps(registry.store.config.model_dump()))["accounts"].keys() == {"weights", "cool"}
