"""Case 4 (runai PR#146, #134): ranks that start together are throttled by the token service; a wrong client id says nothing.

A fake IMDS stands where Azure's would (azure-identity's own variable names it) and counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from components.common.errors import DynamoBlobError
from components.common.storage import shared_token
from components.common.storage.config import CredentialConfig
from components.common.storage.entra import EntraCredential
from tests.faults.services import REPOSITORY

CLIENT = "11111111-2222-3333-4444-555555555555"
CONFIG = CredentialConfig(kind="entra", chain=("managed_identity",))
RANK = """
import sys
from pathlib import Path
from components.common.storage import shared_token
from components.common.storage.config import CredentialConfig
from components.common.storage.credentials import open_credential
shared_token.DIRECTORY = Path(sys.argv[1])
print("up", flush=True)
sys.stdin.readline()
print(open_credential(CredentialConfig(kind="entra", chain=("managed_identity",))).token().token)
"""


class Imds:
    """Tokens of `life_s` for CLIENT; 400 for any other identity, as Azure answers. `calls` = token requests."""

    def __init__(self, life_s: int = 3600) -> None:
        self.calls: list[str] = []
        self.life_s = life_s
        imds = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                client = parse_qs(urlsplit(self.path).query).get("client_id", [""])[0]
                imds.calls.append(client)
                if client == CLIENT:
                    now = int(time.time())
                    body = {
                        "access_token": f"token-{len(imds.calls)}", "expires_on": str(now + imds.life_s), "expires_in": str(imds.life_s),
                        "resource": "https://storage.azure.com/", "token_type": "Bearer",
                    }  # fmt: skip
                    self._say(200, body)
                else:
                    self._say(400, {"error": "invalid_request", "error_description": "Identity not found"})

            def _say(self, status: int, body: dict[str, str]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Imds]:
    found = Imds()
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", found.url)
    monkeypatch.setenv("AZURE_CLIENT_ID", CLIENT)
    monkeypatch.setattr(shared_token, "DIRECTORY", tmp_path)
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_eight_ranks_share_one_token(imds: Imds, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        for _ in range(8)
    ]  # fmt: skip
    for rank in ranks:  # all imported and waiting: now they ask together
        assert rank.stdout is not None and rank.stdout.readline() == "up\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    assert {rank.communicate(timeout=60)[0].strip() for rank in ranks} == {"token-1"}
    assert imds.calls == [CLIENT]
    files = [p for p in tmp_path.glob("dynamo-blob-tokens-*/*") if not p.suffix]
    assert [p.stat().st_mode & 0o777 for p in files] == [0o600] and files[0].parent.stat().st_mode & 0o777 == 0o700


def test_threads_share_it_too_and_a_refused_token_is_replaced_once(imds: Imds) -> None:
    ranks = [EntraCredential(CONFIG) for _ in range(3)]
    assert {r.token().token for r in ranks for _ in range(3)} == {"token-1"}
    assert all(r.refresh() for r in ranks), "after a 401 everyone has another token"
    assert {r.token().token for r in ranks} == {"token-2"} and len(imds.calls) == 2


def test_renewal_is_shared_and_an_old_token_is_not_handed_on(imds: Imds) -> None:
    imds.life_s = 2
    first = EntraCredential(CONFIG)
    assert first.token().token == "token-1"
    end = time.monotonic() + 20
    while first.token().token == "token-1" and time.monotonic() < end:
        time.sleep(0.05)
    assert first.token().token != "token-1"
    assert EntraCredential(CONFIG).token().token != "token-1"


def test_wrong_client_id_is_named(imds: Imds, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "99999999-0000-0000-0000-000000000000"
    monkeypatch.setenv("AZURE_CLIENT_ID", wrong)
    began = time.monotonic()
    with pytest.raises(DynamoBlobError) as e:
        EntraCredential(CONFIG).token()
    assert time.monotonic() - began < 15 and imds.calls[0] == wrong
    assert e.value.code == "STORAGE-NO-CREDENTIAL" and wrong in e.value.why and "AZURE_CLIENT_ID" in e.value.do
    assert "dentity not found" in e.value.why
    monkeypatch.setenv("AZURE_CLIENT_ID", CLIENT)
    assert EntraCredential(CONFIG).token().token.startswith("token-"), "another identity's failure does not stick"


def test_identities_never_share(imds: Imds, monkeypatch: pytest.MonkeyPatch) -> None:
    EntraCredential(CONFIG).token()
    with pytest.raises(DynamoBlobError):
        EntraCredential(CONFIG.model_copy(update={"client_id": "someone-else"})).token()
    assert imds.calls[-1] == "someone-else"


@pytest.mark.parametrize("odd", ["readable", "file", "absent"])
def test_an_odd_directory_means_no_sharing_and_no_error(imds: Imds, tmp_path: Path, odd: str) -> None:
    directory = tmp_path / f"dynamo-blob-tokens-{os.geteuid()}"
    if odd == "readable":
        directory.mkdir()
        directory.chmod(0o755)
    elif odd == "file":
        directory.write_text("")
    else:
        shared_token.DIRECTORY = tmp_path / "nowhere"
    assert {EntraCredential(CONFIG).token().token for _ in range(2)} == {"token-1", "token-2"}
