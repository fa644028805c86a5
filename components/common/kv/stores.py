"""Opens what a tier's settings name: transports, keys, and the notes namespaces leave for each other."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs

from components.common.errors import DynamoBlobError
from components.common.kv.config import KvTiersConfig
from components.common.kv.keys import Namespace
from components.common.kv.store import NAMESPACES
from components.common.storage.account import Account
from components.common.transfer.base import Connection, Transport
from components.common.transfer.nixl_blob import BlobTransport
from components.common.transfer.nixl_posix import PosixTransport
from components.common.transfer.staging import StagingPool

log = logging.getLogger(__name__)

RENEW_AT = 2 / 3


class Notes(Protocol):
    """Small named texts beside the chunks."""

    def put(self, name: str, text: bytes) -> None: ...

    def all(self, prefix: str) -> dict[str, bytes]: ...


class BlobNotes:
    def __init__(self, account: Account, container: str) -> None:
        self._account, self._container = account, container

    def put(self, name: str, text: bytes) -> None:
        self._account.put(self._container, name, text)

    def all(self, prefix: str) -> dict[str, bytes]:
        names = [b.name for b in self._account.list(self._container, prefix)][:64]
        return {n: self._account.get(self._container, n) for n in names}


class DirectoryNotes:
    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, text: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_bytes(text)
        os.replace(part, path)

    def all(self, prefix: str) -> dict[str, bytes]:
        folder = self._root / prefix
        return (
            {f"{prefix}{p.name}": p.read_bytes() for p in sorted(folder.glob("*.json"))[:64]} if folder.is_dir() else {}
        )


class Others:
    """Registers this worker's namespaces in the store and finds those of others, in the background, again and again:
    the store may be away at the start, and another release may come later."""

    LOOK_S = 60.0
    AGAIN_S = 5.0

    def __init__(self, notes: Notes, mine: list[Namespace]) -> None:
        self.found: list[dict[str, Any]] = []
        self._notes, self._mine = notes, mine
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="kv-namespaces", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def look(self) -> None:
        """One round, in the caller's thread. Raises whatever the store raises."""
        there = self._notes.all(NAMESPACES)
        for namespace in self._mine:
            name = f"{NAMESPACES}{namespace.digest()}.json"
            if name not in there:
                self._notes.put(name, json.dumps(namespace.model_dump(), sort_keys=True).encode())
        digests = {n.digest() for n in self._mine}
        others = {Path(name).stem: text for name, text in there.items()}
        self.found = [self._compare(d, text) for d, text in sorted(others.items()) if d not in digests]

    def _run(self) -> None:
        failed = 0
        while not self._stop.is_set():
            try:
                self.look()
                failed, wait = 0, self.LOOK_S
            except Exception as e:  # advice only: the tier works without it
                if not failed and not self._stop.is_set():
                    log.warning("namespaces in the store could not be compared: %s", e)
                wait = min(self.AGAIN_S * 2**failed, self.LOOK_S)
                failed = min(failed + 1, 10)
            self._stop.wait(wait)

    def _compare(self, digest: str, text: bytes) -> dict[str, Any]:
        """The other namespace and how it differs from the most similar of ours."""
        try:
            other = Namespace.model_validate_json(text)
        except ValueError:
            return {"namespace": digest, "differs": {"object_format": "not readable by this version"}}
        nearest = min((m.differs(other) for m in self._mine), key=len)
        return {"namespace": digest, "differs": {k: {"here": a, "there": b} for k, (a, b) in nearest.items()}}


def blob_transport(account: Account, container: str, pool: StagingPool, config: KvTiersConfig) -> Transport:
    return BlobTransport(
        pool,
        lambda: connection(account, container),
        threads=config.threads,
        container=lambda: account.probe(container),
        errors=config.breaker_errors,
        open_s=config.breaker_open_s,
        max_open_s=config.breaker_max_open_s,
        name=container,
    )


def posix_transport(root: str, pool: StagingPool, config: KvTiersConfig) -> Transport:
    return PosixTransport(
        pool,
        Path(root),
        errors=config.breaker_errors,
        open_s=config.breaker_open_s,
        max_open_s=config.breaker_max_open_s,
    )


def connection(account: Account, container: str) -> Connection:
    """NIXL parameters with a credential of the moment; void at 2/3 of what is left of its life."""
    config = account.config
    params = {"container_name": container}
    if config.ca_bundle:
        params["ca_bundle"] = config.ca_bundle
    if config.credential.kind == "entra":
        return Connection({**params, "account_url": config.url}, None)
    text = account.connection_string(container)
    signature = text.partition("SharedAccessSignature=")[2]
    end = parse_qs(signature).get("se", [""])[0]
    expires = None
    if end:
        left = _unix(end) - time.time()
        expires = time.time() + max(1.0, left * RENEW_AT)
    return Connection({**params, "connection_string": text}, expires)


def mac_key(path: str) -> bytes | None:
    """The key of keyed digests, from a private file; None for an empty path. Raises KV-MAC-KEY."""
    if not path:
        return None
    try:
        if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            raise ValueError("others can read it: chmod 600")
        key = bytes.fromhex(Path(path).read_text().strip())
        if len(key) != 32:
            raise ValueError(f"{len(key)} bytes, wanted 32")
    except (OSError, ValueError) as e:
        raise DynamoBlobError(
            "KV-MAC-KEY", "the key of keyed KV digests cannot be used", where=path, why=str(e),
            do="a file of mode 0600 with 64 hex digits, the same for every worker of the graph",
        ) from None  # fmt: skip
    return key


def _unix(text: str) -> float:
    from datetime import UTC, datetime

    return datetime.fromisoformat(text.replace("Z", "+00:00")).replace(tzinfo=UTC).timestamp()
