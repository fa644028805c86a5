"""Case 3: each storage failure says, in seconds, what it is, where, for whom and what to do; no two sound the same."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from components.common.storage.account import Account
from components.common.storage.config import AccountConfig, CredentialConfig
from components.common.storage.errors import StorageError, from_http
from components.common.storage.sas import new_account_key, write_secret
from tests.registry_store import Registry, new_registry

SECONDS = 8.0


def serve(status: int, code: str) -> tuple[ThreadingHTTPServer, list[str]]:
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(status, "as told")
            self.send_header("x-ms-error-code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, seen


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    yield new_registry()


@pytest.fixture
def sas(tmp_path: Path) -> CredentialConfig:
    token = {"sas": "sv=2024&sig=SECRETSECRET", "expires": time.time() + 3600, "identity": "serving"}
    write_secret(tmp_path / "sas.json", json.dumps(token))
    return CredentialConfig(kind="sas_file", path=str(tmp_path / "sas.json"))


def failure(call: Callable[[], object]) -> StorageError:
    """The error of `call`, which must come within seconds and be complete."""
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        call()
    error = caught.value
    assert time.monotonic() - began < SECONDS
    assert error.where.startswith("http") and "?" not in error.where
    assert "identity: " in error.why and error.do and error.what
    assert "sig=" not in str(error).replace("sig=REDACTED", "") and "SECRET" not in str(error)
    return error


@pytest.mark.parametrize(
    ("status", "storage_code", "code", "tries"),
    [
        (401, "NoAuthenticationInformation", "STORAGE-UNAUTHENTICATED", 1),
        (403, "AuthenticationFailed", "STORAGE-UNAUTHENTICATED", 1),
        (403, "AuthorizationPermissionMismatch", "STORAGE-FORBIDDEN", 1),
        (404, "BlobNotFound", "STORAGE-NOT-FOUND", 1),
        (404, "ContainerNotFound", "STORAGE-NO-CONTAINER", 1),
        (409, "BlobAlreadyExists", "STORAGE-CONFLICT", 1),
        (412, "ConditionNotMet", "STORAGE-PRECONDITION", 1),
        (416, "InvalidRange", "STORAGE-RANGE", 1),
        (429, "ServerBusy", "STORAGE-THROTTLED", 1),
        (503, "ServerBusy", "STORAGE-BUSY", 3),
        (400, "InvalidHeaderValue", "STORAGE-REQUEST", 1),
    ],
)
def test_status(status: int, storage_code: str, code: str, tries: int, sas: CredentialConfig) -> None:
    server, seen = serve(status, storage_code)
    try:
        account = Account(AccountConfig(url=f"http://127.0.0.1:{server.server_port}/acct", credential=sas, retries=2))
        error = failure(lambda: account.get("weights", "x", 5, 7))
    finally:
        server.shutdown()
    assert error.code == code and error.status == status and str(status) in error.why and storage_code in error.why
    assert error.where.endswith("/acct/weights/x") and "sas:serving" in error.why
    assert len(seen) == tries, "retries are bounded, and only where they can help"


def test_no_two_alike() -> None:
    kinds = [
        (401, ""),
        (403, "AuthorizationPermissionMismatch"),
        (404, "BlobNotFound"),
        (404, "ContainerNotFound"),
        (409, ""),
        (412, ""),
        (416, ""),
        (429, ""),
        (503, ""),
    ]
    errors = [from_http(s, c, "http://h/a/c/b?sig=x", "me") for s, c in kinds]
    for field in ("code", "what", "do"):
        assert len({getattr(e, field) for e in errors}) == len(errors)


def test_host_that_does_not_resolve(sas: CredentialConfig) -> None:
    account = Account(AccountConfig(url="http://no-such-host.invalid/acct", credential=sas))
    assert failure(lambda: account.get("c", "b")).code == "STORAGE-DNS"


def test_nothing_listens(sas: CredentialConfig) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # bound, never listening: refused for as long as we hold it
        account = Account(AccountConfig(url=f"http://127.0.0.1:{s.getsockname()[1]}/acct", credential=sas))
        assert failure(lambda: account.get("c", "b")).code == "STORAGE-REFUSED"


def test_no_answer(sas: CredentialConfig) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(8)
        config = AccountConfig(
            url=f"http://127.0.0.1:{s.getsockname()[1]}/acct", credential=sas, read_timeout_s=0.5, retries=1
        )
        assert failure(lambda: Account(config).get("c", "b")).code == "STORAGE-TIMEOUT"


def test_not_tls(registry: Registry, sas: CredentialConfig) -> None:
    port = registry.store.config.port
    account = Account(AccountConfig(url=f"https://127.0.0.1:{port}/weights", credential=sas, retries=1))
    assert failure(lambda: account.get("c", "b")).code == "STORAGE-TLS"


def test_the_store_itself(registry: Registry, tmp_path: Path) -> None:
    """The same kinds from Azurite, not from a canned answer."""
    c = registry.layout.container
    registry.publisher.create(c, "x", b"12345")
    assert failure(lambda: registry.serving.get(c, "nope")).code == "STORAGE-NOT-FOUND"
    assert failure(lambda: registry.root.get("no-such-container", "x")).code == "STORAGE-NO-CONTAINER"
    assert failure(lambda: registry.publisher.create(c, "x", b"other")).code == "STORAGE-CONFLICT"
    assert failure(lambda: registry.publisher.replace(c, "x", b"other", etag='"0x1"')).code == "STORAGE-PRECONDITION"
    assert failure(lambda: registry.serving.get(c, "x", 100, 5)).code == "STORAGE-RANGE"
    assert failure(lambda: registry.serving.create(c, "y", b"")).code == "STORAGE-FORBIDDEN"
    key = tmp_path / "wrong.key"
    write_secret(key, new_account_key())
    wrong = Account(
        registry.root.config.model_copy(update={"credential": CredentialConfig(kind="key_file", path=str(key))})
    )
    assert failure(lambda: wrong.get(c, "x")).code == "STORAGE-UNAUTHENTICATED"
