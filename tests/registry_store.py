"""One Azurite for all registry and storage tests of this process, and registries in it that share nothing."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from components.common.registry.config import TrustConfig
from components.common.registry.layout import Layout
from components.common.registry.signing import SigningKey
from components.common.storage.account import Account
from components.common.storage.azurite import AzuriteConfig, ensure_key, wait_ready
from components.common.storage.config import AccountConfig, CredentialConfig
from components.common.storage.sas import Grant, Role

REPOSITORY = Path(__file__).resolve().parents[1]
_count = itertools.count()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Store:
    """A running Azurite with the accounts `weights` and `cool`."""

    config: AzuriteConfig
    root: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> Path:
        return Path(self.config.access_log)

    def account(
        self,
        role: Role | None = None,
        *,
        container: str = "weights",
        name: str = "weights",
        ttl_s: float = 3600,
        **options: object,
    ) -> Account:
        """The account under `role`, or with its key."""
        url, key = self.config.url(name), self.root / f"{name}.key"
        if role is None:
            credential = CredentialConfig(kind="key_file", path=str(key))
        else:
            path = self.root / f"{role}.{name}.{container}.{next(_count)}.json"
            Grant(path, url, key, role, ttl_s=ttl_s, container=container).write()
            credential = CredentialConfig(kind="sas_file", path=str(path))
        ca = str(self.root / "cert.pem") if self.config.cert else ""
        return Account(AccountConfig(url=url, credential=credential, ca_bundle=ca, **options))


def prepare(root: Path, **options: object) -> AzuriteConfig:
    """Keys and plan file of an Azurite in `root`, not started."""
    for name in ("weights", "cool"):
        ensure_key(root / f"{name}.key")
    config = AzuriteConfig(
        data_dir=str(root / "data"), port=free_port(), accounts={n: str(root / f"{n}.key") for n in ("weights", "cool")},
        access_log=str(root / "access.jsonl"), **options,
    )  # fmt: skip
    (root / "plan.json").write_text(config.model_dump_json())
    return config


def start(root: Path, **options: object) -> Store:
    config = prepare(root, **options)
    with (root / "out").open("wb") as out:
        argv = [sys.executable, "-m", "components.common.storage.azurite", "--plan", str(root / "plan.json")]
        process = subprocess.Popen(
            argv, cwd=REPOSITORY, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
        )
    wait_ready(config, 60, process)
    return Store(config, root, process)


def stop(store: Store) -> None:
    store.process.terminate()
    try:
        store.process.wait(10)
    except subprocess.TimeoutExpired:
        store.process.kill()
        store.process.wait()


@functools.cache
def shared_store() -> Store:
    root = Path(tempfile.mkdtemp(prefix="dynamo-blob-store-"))
    store = start(root, in_memory=True)

    def end() -> None:
        stop(store)
        shutil.rmtree(root, ignore_errors=True)

    atexit.register(end)
    return store


@dataclass
class Registry:
    """A registry of its own: containers, an account per identity, keys."""

    store: Store
    layout: Layout
    publisher_key: SigningKey = field(default_factory=SigningKey.generate)
    approver_key: SigningKey = field(default_factory=SigningKey.generate)

    def __post_init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def account(self, role: Role | None) -> Account:
        name = role or "root"
        if name not in self._accounts:
            self._accounts[name] = self.store.account(role, container=self.layout.container)
        return self._accounts[name]

    @property
    def root(self) -> Account:
        return self.account(None)

    @property
    def publisher(self) -> Account:
        return self.account("publisher")

    @property
    def approver(self) -> Account:
        return self.account("approver")

    @property
    def collector(self) -> Account:
        return self.account("collector")

    @property
    def serving(self) -> Account:
        return self.account("serving")

    @property
    def trust(self) -> TrustConfig:
        return TrustConfig(
            require="approval", publisher_keys=(self.publisher_key.public,), approver_keys=(self.approver_key.public,)
        )


def new_registry() -> Registry:
    registry = Registry(shared_store(), Layout(f"r{os.getpid()}-{next(_count)}"))
    for container in registry.layout.containers:
        registry.root.ensure_container(container)
    return registry


@pytest.fixture
def registry() -> Iterator[Registry]:
    yield new_registry()


def write_model(directory: Path, *, note: str = "", floats: int = 64) -> Path:
    """A small model directory: one safetensors file of two tensors, config, tokenizer, a note that makes versions differ."""
    import json
    import struct

    directory.mkdir(parents=True, exist_ok=True)
    data = b"".join(struct.pack("<f", i / 7) for i in range(floats))
    half = len(data) // 2
    header = {
        "a": {"dtype": "F32", "shape": [floats // 2], "data_offsets": [0, half]},
        "b": {"dtype": "F32", "shape": [floats // 2], "data_offsets": [half, len(data)]},
    }
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    if note:
        (directory / "note.txt").write_text(note)
    return directory


PROVENANCE = {"source": "made for a test", "license": "Apache-2.0"}
