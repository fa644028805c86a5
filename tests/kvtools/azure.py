"""An Azurite of this test's own, with a fresh random key, and accounts that reach it (directly or by a fault proxy)."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from components.common.storage.account import Account
from components.common.storage.azurite import AzuriteConfig, azurite_argv, azurite_env, ensure_key, wait_ready
from components.common.storage.config import AccountConfig, CredentialConfig

NAME = "kvtest"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Store:
    def __init__(self, work: Path) -> None:
        self.work, self.port = work, free_port()
        work.mkdir(parents=True, exist_ok=True)
        self.key = work / "key"
        ensure_key(self.key)
        self.config = AzuriteConfig(
            data_dir=str(work / "data"),
            port=self.port,
            accounts={NAME: str(self.key)},
            access_log=str(work / "access.jsonl"),
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Store:
        Path(self.config.data_dir).mkdir(exist_ok=True)
        env = {"PATH": "/usr/bin:/bin", **azurite_env(self.config)}
        with open(self.work / "azurite.log", "ab") as log:
            self.process = subprocess.Popen(azurite_argv(self.config), env=env, stdout=log, stderr=log)
        wait_ready(self.config, 120.0, process=self.process)
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def account_config(self, port: int | None = None) -> AccountConfig:
        return AccountConfig(
            url=f"http://127.0.0.1:{port or self.port}/{NAME}", credential=CredentialConfig(kind="key_file", path=str(self.key)),
            retries=1,
        )  # fmt: skip

    def account(self, port: int | None = None) -> Account:
        return Account(self.account_config(port))


@contextlib.contextmanager
def azurite(work: Path) -> Iterator[Store]:
    store = Store(work).start()
    try:
        yield store
    finally:
        store.kill()


_shared: list[Store] = []
_containers = itertools.count()


def shared() -> Store:
    """One Azurite for all tests of this process that only need a container of their own."""
    if not _shared:
        store = Store(Path(tempfile.mkdtemp(prefix="dynamo-blob-azurite-"))).start()
        _shared.append(store)

        def end() -> None:
            store.kill()
            shutil.rmtree(store.work, ignore_errors=True)

        atexit.register(end)
    return _shared[0]


def new_container(store: Store) -> str:
    name = f"kv-{next(_containers)}"
    store.account().ensure_container(name)
    return name
