"""Shared access signatures: which identity may do what, and their issuer.

Locally `dynamo serve` plays the part that workload identities and role assignments play on AKS: it
alone holds the account keys and writes one file per identity, renewed at half of its life, so that a
reader that renews at 2/3 always finds the next one. A file (mode 0600, replaced by rename):

    {"sas": ..., "containers": {name: sas}, "issued": unix s, "expires": unix s, "identity": role}

`sas` is valid for the whole account; a container listed under `containers` has its own, with more rights.

| role | account | registry (`weights`) | `weights-approvals` | `weights-audit` |
|---|---|---|---|---|
| serving | read, list | | | + add |
| publisher | read, list | + create, write | | + create, add |
| approver | read, list | | + create, write | + create, add |
| collector | read, list | + create, write, delete | + create, write | + create, add |
| kv | read, list, create, write, delete | | | |
| reader | read, list | | | |
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from components.common.errors import DynamoBlobError, nearest

Role = Literal["serving", "publisher", "approver", "collector", "kv", "reader"]
_SKEW_S = 300  # a token starts this much in the past: clocks of issuer and service may differ
_AUDIT = "racl"
_RIGHTS: dict[str, tuple[str, dict[str, str]]] = {
    "reader": ("rl", {}),
    "serving": ("rl", {"-audit": "ral"}),
    "publisher": ("rl", {"": "rcwl", "-audit": _AUDIT}),
    "approver": ("rl", {"-approvals": "rcwl", "-audit": _AUDIT}),
    "collector": ("rl", {"": "rcwdl", "-approvals": "rcwl", "-audit": _AUDIT}),
    "kv": ("rwdlc", {}),
}


def account_name(url: str) -> str:
    """Account of a blob endpoint: first path segment for an IP or localhost, first label of the host otherwise."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host == "localhost" or host.replace(".", "").isdigit() or ":" in host:
        return parts.path.strip("/").split("/")[0]
    return host.split(".")[0]


def new_account_key() -> str:
    """A random account key, base64 of 64 bytes."""
    return base64.b64encode(secrets.token_bytes(64)).decode()


def write_secret(path: Path, text: str) -> None:
    """Write `text` to `path` with mode 0600, atomically: readers see the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    tmp = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(fd, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


def read_secret(path: str | Path) -> str:
    """Content of a secret file. Raises STORAGE-CREDENTIAL-UNREADABLE, also when others may read it."""
    p = Path(path)
    try:
        mode = p.stat().st_mode & 0o777
        text = p.read_text().strip()
    except OSError as e:
        raise DynamoBlobError(
            "STORAGE-CREDENTIAL-UNREADABLE", "the credential file cannot be read", where=str(path), why=str(e.strerror or e),
            do="locally `dynamo serve` writes it; check the path in the component's plan",
        ) from None  # fmt: skip
    if mode & 0o077:
        raise DynamoBlobError(
            "STORAGE-CREDENTIAL-UNREADABLE", "the credential file is readable by others", where=str(path),
            why=f"mode {mode:04o}, wanted 0600", do=f"chmod 600 {path}",
        )  # fmt: skip
    return text


def issue(
    url: str, key: str, role: Role, *, ttl_s: float, container: str = "weights", now: float | None = None
) -> dict[str, Any]:
    """The content of `role`'s credential file for the account at `url`; `ttl_s` seconds from now (whole seconds)."""
    from azure.storage.blob import generate_account_sas, generate_container_sas  # half of a command's start

    if role not in _RIGHTS:
        raise DynamoBlobError("STORAGE-ROLE-UNKNOWN", f"there is no identity '{role}'", why=nearest(role, _RIGHTS))
    issued = time.time() if now is None else now
    start = datetime.fromtimestamp(issued - _SKEW_S, UTC)
    end = datetime.fromtimestamp(int(issued + ttl_s), UTC)
    name = account_name(url)
    whole, extra = _RIGHTS[role]
    return {
        "sas": generate_account_sas(
            name, key, resource_types="co", permission=whole, expiry=end, start=start, services="b"
        ),
        "containers": {
            container + suffix: generate_container_sas(
                name, container + suffix, account_key=key, permission=rights, expiry=end, start=start
            )
            for suffix, rights in extra.items()
        },
        "issued": issued,
        "expires": end.timestamp(),
        "identity": role,
    }


@dataclass(frozen=True)
class Grant:
    """One credential file the issuer keeps fresh."""

    path: Path
    url: str
    key_file: Path
    role: Role
    ttl_s: float = 3600.0
    container: str = "weights"

    def write(self) -> None:
        token = issue(self.url, read_secret(self.key_file), self.role, ttl_s=self.ttl_s, container=self.container)
        write_secret(self.path, json.dumps(token))


class SasIssuer:
    """Writes the files of `grants` and renews each at half of its life until closed.

    `start` returns after every file exists. A failed renewal (disk full) is tried again every second
    and kept in `last_error`; readers go on with the old token until it ends.
    """

    def __init__(self, grants: Iterable[Grant]) -> None:
        self.grants = tuple(grants)
        self.renewals = 0
        self.last_error = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> SasIssuer:
        for grant in self.grants:
            grant.write()
        self._thread = threading.Thread(target=self._run, name="sas-issuer", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop renewing and remove the files: what is left of their life should not lie about."""
        self._stop.set()
        if self._thread:
            self._thread.join(5)
        for grant in self.grants:
            grant.path.unlink(missing_ok=True)

    def _run(self) -> None:
        due = {g: time.monotonic() + g.ttl_s / 2 for g in self.grants}
        while due and not self._stop.wait(max(0.05, min(due.values()) - time.monotonic())):
            for grant in [g for g, t in due.items() if t <= time.monotonic()]:
                try:
                    grant.write()
                    self.renewals += 1
                    self.last_error = ""
                    due[grant] = time.monotonic() + grant.ttl_s / 2
                except (OSError, DynamoBlobError) as e:
                    self.last_error = str(e)
                    due[grant] = time.monotonic() + 1.0

    def __enter__(self) -> SasIssuer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
