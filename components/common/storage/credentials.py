"""How a component proves who it is to one storage account.

Contract of every `Credential`:

    sign(url)   -> (url, headers): the URL to request (SAS appended) and headers to add; always fresh.
                   Costs microseconds; it blocks only when there is no valid token at all, and then for seconds at most.
    refresh()   -> True if the credential has changed: ask once after a 401 or 403, then repeat the request.
    sdk()       -> a credential object for azure-storage-blob clients of your own.
    identity    -> who this is, for messages and audit; never a secret.

Renewal happens at 2/3 of a token's life, while the old one still works. Safe from any thread.
A clock that jumps costs nothing: time goes by two clocks (`Life`), and where they disagree the store decides.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from azure.core.credentials import AzureSasCredential

from components.common.errors import DynamoBlobError
from components.common.storage.config import CredentialConfig
from components.common.storage.errors import StorageError, bare
from components.common.storage.sas import account_name, issue, read_secret

RENEW_AT = 2 / 3  # of a token's life


class Credential(ABC):
    identity: str = ""

    @abstractmethod
    def sign(self, url: str) -> tuple[str, dict[str, str]]: ...

    @abstractmethod
    def sdk(self) -> Any: ...

    def refresh(self) -> bool:
        return False

    def close(self) -> None:  # noqa: B027 - most credentials hold nothing
        """Release what it holds; the credential cannot be used afterwards."""


def open_credential(config: CredentialConfig, url: str = "") -> Credential:
    """The credential that `config` describes; `url` is the account's endpoint (needed by key_file's `sdk`)."""
    if config.kind == "sas_file":
        return SasFileCredential(config.path)
    if config.kind == "key_file":
        return KeyFileCredential(config.path, url)
    from components.common.storage.entra import EntraCredential  # azure.identity costs 0.3 s to import

    return EntraCredential(config)


def container_of(url: str) -> str:
    """Name of the container that `url` addresses, empty for the account itself."""
    parts = urlsplit(url)
    segments = [unquote(s) for s in parts.path.split("/") if s]
    host = parts.hostname or ""
    if host == "localhost" or host.replace(".", "").isdigit() or ":" in host:
        segments = segments[1:]
    return segments[0] if segments else ""


def _append(url: str, sas: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{sas}"


class Life:
    """When a token is to be renewed and when it ends, by the wall clock and by how long we have had it.

    The wall clock may be set, or the machine suspended (then the other clock stood still). Renewal is tried when either
    says so; "ended" is only what both say: else the token is sent, and the store, which has the clock that counts, decides.
    """

    def __init__(self, renew: float, expires: float) -> None:
        self.renew, self.expires = renew, expires
        self._wall, self._mono = time.time(), time.monotonic()

    def _clocks(self) -> tuple[float, float]:
        return time.time(), self._wall + time.monotonic() - self._mono

    @property
    def due(self) -> bool:
        return max(self._clocks()) >= self.renew

    @property
    def ended(self) -> bool:
        return min(self._clocks()) >= self.expires


class SasFileCredential(Credential):
    """A SAS from a file that its issuer keeps fresh (see `components.common.storage.sas`)."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.reloads = 0
        self._lock = threading.Lock()
        self._token: dict[str, Any] = {}
        self._next_look = 0.0
        self._load()

    @property
    def identity(self) -> str:  # type: ignore[override]
        return f"sas:{self._token.get('identity') or Path(self.path).stem}"

    @property
    def expires(self) -> float:
        """Unix seconds at which the token in use ends."""
        return float(self._token["expires"])

    def _load(self) -> bool:
        try:
            token = json.loads(read_secret(self.path))
            sas, expires = str(token["sas"]).lstrip("?"), float(token["expires"])
            issued = float(token.get("issued") or Path(self.path).stat().st_mtime)
        except (ValueError, KeyError, TypeError, OSError) as e:
            raise DynamoBlobError(
                "STORAGE-CREDENTIAL-UNREADABLE", "the SAS file is not valid", where=self.path, why=type(e).__name__,
                do='it must hold JSON {"sas": ..., "expires": unix seconds}; its issuer writes it',
            ) from None  # fmt: skip
        changed = sas != self._token.get("sas")
        life = max(1.0, expires - issued)
        self._token = token | {"sas": sas, "expires": expires, "life": life}
        if changed:  # what was read already keeps the clocks it was read with
            self._life = Life(issued + life * RENEW_AT, expires)
        return changed

    def _current(self) -> dict[str, Any]:
        if not self._life.due:
            return self._token
        with self._lock:
            now = time.monotonic()
            if self._life.due and now >= self._next_look:
                self._next_look = now + min(1.0, self._token["life"] / 60)
                try:
                    self.reloads += self._load()
                except DynamoBlobError:
                    if self._life.ended:
                        raise
        if self._life.ended:
            raise StorageError(
                "STORAGE-CREDENTIAL-EXPIRED", "the SAS has expired and no new one was written", where=self.path,
                why=f"it ended {time.time() - self._token['expires']:.0f} s ago; identity: {self.identity}",
                do="see that its issuer runs (locally: `dynamo serve`) and that the clocks agree", status=0,
            )  # fmt: skip
        return self._token

    def sas(self, container: str = "") -> str:
        """The SAS for `container`, without a leading question mark."""
        token = self._current()
        found = token.get("containers", {}).get(container) if container else None
        return str(found or token["sas"])

    def sign(self, url: str) -> tuple[str, dict[str, str]]:
        return _append(url, self.sas(container_of(url))), {}

    def refresh(self) -> bool:
        with self._lock:
            try:
                return self._load()
            except DynamoBlobError:
                return False

    def sdk(self) -> AzureSasCredential:
        return _FreshSas(self)


class _FreshSas(AzureSasCredential):
    """The account-wide SAS, re-read on each request. `Account` signs each URL itself and is preferred:
    the SDK's policy appends a second signature when a token changes between retries."""

    def __init__(self, source: SasFileCredential | KeyFileCredential) -> None:
        self._source = source
        super().__init__(source.sas())

    @property
    def signature(self) -> str:
        return self._source.sas()


class KeyFileCredential(Credential):
    """Everything, with the account key: for the local launcher only. Signs with short account SAS tokens."""

    LIFE_S = 3600.0

    def __init__(self, path: str | Path, url: str = "") -> None:
        self.path, self.url = str(path), url
        self.identity = f"key:{account_name(url)}" if url else "key"
        read_secret(self.path)
        self._lock = threading.Lock()
        self._sas: dict[str, tuple[str, float]] = {}

    def sas(self, container: str = "", url: str = "") -> str:
        from azure.storage.blob import generate_account_sas

        endpoint = url or self.url
        name, now = account_name(endpoint), time.time()
        with self._lock:
            sas, until = self._sas.get(name, ("", 0.0))
            if now >= until:
                key = read_secret(self.path)
                from datetime import UTC, datetime

                sas = generate_account_sas(
                    name, key, resource_types="sco", permission="rwdlacuptfx", services="b",
                    start=datetime.fromtimestamp(now - 300, UTC), expiry=datetime.fromtimestamp(now + self.LIFE_S, UTC),
                )  # fmt: skip
                self._sas[name] = (sas, now + self.LIFE_S * RENEW_AT)
        return sas

    def sign(self, url: str) -> tuple[str, dict[str, str]]:
        return _append(url, self.sas(url=url)), {}

    def refresh(self) -> bool:
        with self._lock:  # signed by a clock that was set since, perhaps
            had = bool(self._sas)
            self._sas.clear()
        return had

    def sdk(self) -> AzureSasCredential:
        if not self.url:
            raise DynamoBlobError(
                "STORAGE-CREDENTIAL-UNREADABLE", "a key credential needs the account URL for the SDK", where=self.path
            )
        return _FreshSas(self)


__all__ = [
    "RENEW_AT",
    "Credential",
    "KeyFileCredential",
    "SasFileCredential",
    "bare",
    "container_of",
    "issue",
    "open_credential",
]
