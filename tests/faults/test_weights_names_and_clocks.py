"""What the machine itself may do to a load: its name service goes away, its clock is set."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.standin import StandIn
from components.common.errors import DynamoBlobError
from components.common.loading.report import Report
from components.common.loading.session import Session, open_session
from components.common.registry.manifest import Manifest
from components.common.storage import credentials
from components.common.storage.config import AccountConfig, CredentialConfig
from components.common.storage.credentials import SasFileCredential
from components.common.storage.ranges import RangeReader
from tests.faults import stores
from tests.faults.proxy import FaultProxy, Rule
from tests.faults.releases import MiB, digests, sas_file, weights_config
from tests.faults.stores import OBJECTS, WANTED

HOST = "weights.test"
release, proxy = stores.release, stores.proxy


class NameService:
    """`state` says what happens to look-ups of HOST: "answers", "fails", or "hangs" until the test is over."""

    def __init__(self) -> None:
        self.state, self.over, self._real = "answers", threading.Event(), socket.getaddrinfo

    def __call__(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != HOST:
            return self._real(host, port, *args, **kwargs)
        if self.state == "hangs":
            self.over.wait(60)
        if self.state != "answers":
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._real("127.0.0.1", port, *args, **kwargs)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameService]:
    service = NameService()
    monkeypatch.setattr(socket, "getaddrinfo", service)
    yield service
    service.over.set()


def load(config: Any, middle: Callable[[Session], None]) -> dict[str, Any]:
    """Load with memory for little more than a tensor; `middle` runs when the first is here and most are not."""
    report, tensors = Report(), dict[str, torch.Tensor]()
    with open_session(config.model_copy(update={"budget_bytes": 3 * MiB}), None, report) as session:
        for name, tensor in session.tensors():
            if not tensors:
                middle(session)
            tensors[name] = tensor.clone()
    assert digests(tensors) == WANTED
    return report.as_json()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_names_are_lost_in_the_middle_and_every_connection_with_them(
    proxy: FaultProxy, names: NameService, tmp_path: Path, release: tuple[Path, Manifest], how: str
) -> None:
    c = weights_config(f"http://{HOST}:{proxy.port}/standin", tmp_path / "w", release[1])
    readers: list[tuple[RangeReader, int]] = []

    def lose(session: Session) -> None:
        reader = session.resolved.reader
        names.state, reader._name._until = how, 0.0  # its answers are no longer fresh
        proxy.rules = [Rule("reset", OBJECTS, after=-1, times=8)]
        readers.append((reader, reader.connects))

    report = load(c.model_copy(update={"range_retries": 12}), lose)
    reader, connects = readers[0]
    assert proxy.faults["reset"] == 8 and report["retries"] >= 1
    assert reader.connects > connects and reader._name.stale >= 1, "connected anew by the addresses known before"


def test_a_store_that_is_away_for_a_moment_in_the_middle(tmp_path: Path, release: tuple[Path, Manifest]) -> None:
    """Nothing listens any more (the store restarts): refused connections are retried once the store was there."""
    server = StandIn(release[0]).start()
    port, back = server.port, list[StandIn]()

    def restart(session: Session) -> None:
        server.close()
        threading.Timer(0.5, lambda: back.append(StandIn(release[0], port).start())).start()

    c = weights_config(f"http://127.0.0.1:{port}/standin", tmp_path / "w", release[1], range_retries=8)
    try:
        report = load(c, restart)
        assert report["retries"] >= 1 and report["error.STORAGE-REFUSED"] >= 1
    finally:
        for s in back:
            s.close()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_name_that_never_was_answered_ends_by_the_deadline(names: NameService, tmp_path: Path, how: str) -> None:
    names.state = how
    url, began = f"http://{HOST}:9/standin", time.monotonic()
    credential = CredentialConfig(kind="sas_file", path=str(sas_file(tmp_path)))
    reader = RangeReader(AccountConfig(url=url, credential=credential, connect_timeout_s=1.0))
    with pytest.raises(DynamoBlobError) as e:
        reader.read_into("weights", "x", 0, memoryview(bytearray(10)), deadline=began + 5)
    assert e.value.code == "STORAGE-DNS" and HOST in e.value.where
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("jump_s", [7200, -7200])
def test_the_clock_is_set_in_the_middle(
    proxy: FaultProxy, tmp_path: Path, release: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    """Two hours, with tokens of one. Ahead: the store, whose clock is right, still takes the token. Back: it no longer does
    (its life is over there), and the new one that the issuer wrote is used, however young our clock thinks the old one is."""
    c = weights_config(proxy.url("standin"), tmp_path / "w", release[1])
    token, real = json.loads(Path(c.account.credential.path).read_text()), time.time
    used: list[str] = []

    def jump(session: Session) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        if jump_s < 0:
            Path(c.account.credential.path).write_text(json.dumps({**token, "sas": "sv=1&sig=fresh"}))
            proxy.rules = [Rule("expired", OBJECTS, times=1)]
        used.append(str(proxy.requests))

    def last(session: Session) -> str:
        return session.resolved.reader.credential.sign("http://h/c/b")[0]  # type: ignore[union-attr]

    seen: list[Session] = []
    report = load(c, lambda s: (jump(s), seen.append(s))[0])
    assert proxy.requests > int(used[0]), "some of it was read after the jump"
    assert last(seen[0]).endswith("sig=fresh" if jump_s < 0 else "sig=x")
    assert report.get("error.STORAGE-CREDENTIAL-EXPIRED", 0) == 0


class Clocks:
    def __init__(self) -> None:
        self.wall, self.mono = 1_000_000.0, 50.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.mono


def test_two_clocks_decide_when_a_token_is_renewed_and_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks, path = Clocks(), tmp_path / "s.json"

    def write(sas: str) -> None:
        path.write_text(json.dumps({"sas": sas, "issued": 1_000_000.0, "expires": 1_000_300.0, "identity": "serving"}))
        path.chmod(0o600)

    monkeypatch.setattr(credentials, "time", clocks)
    write("old")
    one = SasFileCredential(path)
    clocks.wall -= 3600  # set back; then 2/3 of the life go by
    assert one.sas() == "old"
    clocks.mono += 201
    write("new")
    assert one.sas() == "new", "renewed in time although the wall clock says: an hour to go"
    clocks.wall, clocks.mono = 1_000_000.0, 50.0
    write("old")
    two = SasFileCredential(path)
    path.unlink()
    clocks.wall += 3000  # ahead, or the machine slept
    assert two.sas() == "old", "the store decides"
    clocks.mono += 301
    with pytest.raises(DynamoBlobError, match="STORAGE-CREDENTIAL"):
        two.sas()
