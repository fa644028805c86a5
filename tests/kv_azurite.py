"""A private Azurite with one KV account, for tests of what lies in Blob."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.common.kv.epochs import scoped
from components.common.kv.store import KvStore
from components.common.messages.salt import tenant_hash
from components.common.storage.azurite import AzuriteConfig, ensure_key, wait_ready
from components.common.storage.config import AccountConfig, CredentialConfig
from components.common.storage.sas import Grant
from tests.kvtools.azure import new_container, shared

ACCOUNT = "retkv"
NAMESPACE = "ab" * 16


class KvAzurite:
    """Azurite on `port`; `account` is the KV identity's config."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, key = folder, folder / "account.key"
        ensure_key(key)
        self.config = AzuriteConfig(
            data_dir=str(folder / "data"), port=port, accounts={ACCOUNT: str(key)}, in_memory=True
        )
        (folder / "azurite.json").write_text(self.config.model_dump_json())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "components.common.storage.azurite", "--plan", str(folder / "azurite.json")],
            stdout=subprocess.DEVNULL,
        )
        wait_ready(self.config, 60, self.process)
        Grant(folder / "kv.sas.json", self.config.url(ACCOUNT), key, "kv").write()
        self.account = AccountConfig(
            url=self.config.url(ACCOUNT),
            credential=CredentialConfig(kind="sas_file", path=str(folder / "kv.sas.json")),
            retries=1,
            read_timeout_s=10,
        )

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)


def free_port(first: int) -> int:
    """A port of this module's range that differs between xdist workers."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return first + int(worker.removeprefix("gw") or 0)


def name(tenant: str, number: int | str, generation: int = 0, namespace: str = NAMESPACE) -> str:
    h = hashlib.sha256(f"{tenant}/{number}".encode()).hexdigest()
    return f"{tenant_hash(tenant)}/{scoped(namespace, generation)}/{h[:2]}/{h}"


def write_plan(path: Path, model: object) -> Path:
    path.write_text(json.dumps(model))
    return path


@pytest.fixture
def kv_store() -> Iterator[KvStore]:
    """A new container of the Azurite that all tests of this process share."""
    server = shared()
    account = server.account()
    kv = KvStore(account, new_container(server))
    yield kv
    kv.close()
    account.close()
