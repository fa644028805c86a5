"""What keeps purged objects alive is found, or said not to be known. Azurite has neither versions nor soft delete: a
stand-in gives the answers that the service documents, at the level of HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from components.common.kv.purge import recoverable
from components.common.kv.store import KvStore
from components.common.storage.account import Account
from components.common.storage.azurite import ensure_key
from components.common.storage.config import AccountConfig, CredentialConfig

PROPERTIES = """<?xml version="1.0" encoding="utf-8"?><StorageServiceProperties><DefaultServiceVersion>2023-11-03</DefaultServiceVersion>
<DeleteRetentionPolicy><Enabled>{on}</Enabled>{days}</DeleteRetentionPolicy></StorageServiceProperties>"""


@contextlib.contextmanager
def account(tmp_path: Path, days: int, version: str, forbidden: tuple[str, ...]) -> Iterator[KvStore]:
    """An account that keeps deleted blobs for `days`, answers a put with `version`, and forbids some methods."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status if self.command not in forbidden else 403)
            if self.command in forbidden:
                body, headers = b"", {"x_ms_error_code": "AuthorizationPermissionMismatch"}
            for key, value in {**headers, "Content_Length": str(len(body))}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            text = PROPERTIES.format(on=str(days > 0).lower(), days=f"<Days>{days}</Days>" if days else "")
            self.answer(200, text.encode(), Content_Type="application/xml")

        def do_PUT(self) -> None:
            self.answer(201, ETag='"0x1"', Last_Modified="Mon, 30 Nov 2026 08:00:00 GMT", **({"x_ms_version_id": version} if version else {}))  # fmt: skip

        def do_DELETE(self) -> None:
            self.answer(202)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    ensure_key(tmp_path / "key")
    credential = CredentialConfig(kind="key_file", path=str(tmp_path / "key"))
    found = Account(AccountConfig(url=f"http://127.0.0.1:{server.server_port}/acct", credential=credential, retries=0))
    store = KvStore(found, "kv")
    try:
        yield store
    finally:
        store.close()
        found.close()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("days", "version", "forbidden", "until", "says"),
    [
        (0, "", (), 0, "neither"),
        (7, "", (), 1000 + 7 * 86400, "7 days"),
        (0, "2026-11-30T08:00:00.0000000Z", (), -1, "versioning"),
        (7, "2026-11-30T08:00:00.0000000Z", (), -1, "versioning"),
        (0, "", ("GET",), -1, "soft delete: STORAGE-FORBIDDEN"),
        (0, "2026-11-30T08:00:00.0000000Z", ("GET",), -1, "versioning"),
        (7, "", ("PUT",), -1, "versioning: STORAGE-FORBIDDEN"),
        (0, "", ("GET", "PUT"), -1, "soft delete: STORAGE-FORBIDDEN; versioning: STORAGE-FORBIDDEN"),
    ],
)
def test_what_the_account_keeps_is_found_or_said_to_be_unknown(
    tmp_path: Path, days: int, version: str, forbidden: tuple[str, ...], until: float, says: str
) -> None:
    with account(tmp_path, days, version, forbidden) as store:
        protection: dict[str, Any] = store.protection()
    found = recoverable(protection, 1000)
    assert found["until"] == until and says in found["why"]
