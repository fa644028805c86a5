"""The Entra path, end to end on one machine: a fake token endpoint, azure-identity, Azurite over https with OAuth."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from components.common.errors import DynamoBlobError
from components.common.storage.account import Account
from components.common.storage.config import AccountConfig, CredentialConfig
from components.common.storage.entra import EntraCredential
from components.common.storage.errors import StorageError
from components.common.storage.ranges import RangeReader
from tests.registry_store import Store, start, stop
from tests.tls import write_certificate

TENANT = "00000000-0000-0000-0000-00000000feed"


class Tokens:
    """A token endpoint: counts requests, gives unsigned JWTs of `life_s` seconds for `audience`; `down` refuses."""

    def __init__(self, cert: Path, key: Path) -> None:
        self.requests: list[dict[str, list[str]]] = []
        self.life_s, self.audience, self.down, self.delay_s = 3600, "https://storage.azure.com", False, 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                outer.requests.append(form)
                time.sleep(outer.delay_s)
                body = (
                    {"error": "invalid_client", "error_description": "AADSTS70021: no match"}
                    if outer.down
                    else outer.token()
                )
                data = json.dumps(body).encode()
                self.send_response(401 if outer.down else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def token(self) -> dict[str, object]:
        now = int(time.time())
        claims = {
            "aud": self.audience, "iss": f"https://sts.windows.net/{TENANT}/", "nbf": now - 60, "iat": now - 60, "exp": now + self.life_s,
            "jti": str(len(self.requests)),
        }  # fmt: skip
        parts = [
            base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=").decode()
            for p in ({"alg": "none", "typ": "JWT"}, claims)
        ]
        return {"access_token": ".".join([*parts, "c2ln"]), "expires_in": self.life_s, "token_type": "Bearer"}


@pytest.fixture(scope="module")
def https_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("https")
    cert, key = write_certificate(root)
    store = start(root, in_memory=True, cert=str(cert), key=str(key), oauth=True)
    owner = store.account()
    owner.ensure_container("weights")
    owner.put("weights", "x", bytes(range(200)))
    yield store
    stop(store)


@pytest.fixture
def tokens(https_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tokens]:
    served = Tokens(https_store.root / "cert.pem", https_store.root / "key.pem")
    (tmp_path / "federated").write_text("kubernetes-service-account-token")
    for name, value in {
        "AZURE_AUTHORITY_HOST": f"https://127.0.0.1:{served.server.server_port}", "AZURE_TENANT_ID": TENANT, "AZURE_CLIENT_ID": "env-client",
        "AZURE_FEDERATED_TOKEN_FILE": str(tmp_path / "federated"), "REQUESTS_CA_BUNDLE": str(https_store.root / "cert.pem"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield served
    served.server.shutdown()


def entra(store: Store, *chain: str, client_id: str = "my-client") -> Account:
    credential = CredentialConfig(kind="entra", chain=chain or ("workload_identity",), client_id=client_id)
    return Account(
        AccountConfig(url=store.config.url("weights"), credential=credential, ca_bundle=str(store.root / "cert.pem"))
    )


def test_reads_and_writes_with_a_workload_identity(https_store: Store, tokens: Tokens) -> None:
    account = entra(https_store)
    account.create("weights", f"by-entra-{time.monotonic_ns()}", b"1")
    assert account.get("weights", "x", 10, 3) == bytes([10, 11, 12])
    form = tokens.requests[0]
    assert (
        len(tokens.requests) == 1
        and form["client_id"] == ["my-client"]
        and form["scope"] == ["https://storage.azure.com/.default"]
    )
    assert form["client_assertion"] == ["kubernetes-service-account-token"]
    assert account.identity == "entra:my-client"


def test_the_range_reader_takes_the_same_path(https_store: Store, tokens: Tokens) -> None:
    account = entra(https_store)
    reader, buffer = RangeReader(account.config, account.credential), bytearray(50)
    reader.read_into("weights", "x", 100, memoryview(buffer))
    assert bytes(buffer) == bytes(range(100, 150)) and len(tokens.requests) == 1


def test_the_chain_is_configurable_and_named_in_errors(https_store: Store, tokens: Tokens) -> None:
    account = entra(https_store, "environment", "workload_identity")
    assert account.get("weights", "x", 0, 1) == b"\0", "environment has no secret here, workload identity has"
    with pytest.raises(DynamoBlobError, match="did you mean 'managed_identity'"):
        entra(https_store, "managed_identiy").get("weights", "x")


def test_a_refused_identity_says_so_in_seconds(https_store: Store, tokens: Tokens) -> None:
    tokens.down = True
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        entra(https_store).get("weights", "x")
    assert (
        caught.value.code == "STORAGE-NO-CREDENTIAL"
        and "AADSTS70021" in caught.value.why
        and "entra:my-client" in caught.value.why
    )
    assert time.monotonic() - began < 8


def test_a_token_for_another_audience_is_refused_by_the_store(https_store: Store, tokens: Tokens) -> None:
    """Negative control: the store does look at the token."""
    tokens.audience = "https://graph.microsoft.com"
    with pytest.raises(StorageError) as caught:
        entra(https_store).get("weights", "x")
    assert caught.value.code == "STORAGE-UNAUTHENTICATED"


def test_renewal_at_two_thirds_without_waiting(https_store: Store, tokens: Tokens) -> None:
    """6 s tokens under load: renewed in the background, while requests go on with the old one."""
    tokens.life_s = 6
    account = entra(https_store)
    account.get("weights", "x")
    tokens.delay_s = 0.5
    slowest, end, requests = 0.0, time.monotonic() + 9, 0
    while time.monotonic() < end:
        began = time.perf_counter()
        account.credential.sign("https://h/c/b")
        slowest = max(slowest, time.perf_counter() - began)
        account.get("weights", "x", 0, 1)
        requests += 1
    assert requests > 20 and len(tokens.requests) >= 3
    assert slowest < 0.4, "no caller waited for a token"


def test_case_04_many_threads_one_token_request(tokens: Tokens) -> None:
    """Eight ranks of one process start together: one request to the token endpoint, not eight (throttled IMDS)."""
    tokens.delay_s = 0.3
    credential = EntraCredential(CredentialConfig(kind="entra", chain=("workload_identity",), client_id="c"))
    got: list[str] = []
    threads = [
        threading.Thread(target=lambda: got.append(credential.sign("https://h/c/b")[1]["Authorization"]))
        for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 8 and len(set(got)) == 1 and len(tokens.requests) == 1 == credential.requests


def test_never_over_http(tokens: Tokens) -> None:
    credential = EntraCredential(CredentialConfig(kind="entra", chain=("workload_identity",), client_id="c"))
    with pytest.raises(StorageError, match="https only"):
        credential.sign("http://127.0.0.1:1/acct/c/b")
    assert tokens.requests == []


def test_an_untrusted_certificate_is_refused(https_store: Store, tokens: Tokens, tmp_path: Path) -> None:
    other, _ = write_certificate(tmp_path)
    credential = CredentialConfig(kind="entra", chain=("workload_identity",), client_id="c")
    account = Account(
        AccountConfig(url=https_store.config.url("weights"), credential=credential, ca_bundle=str(other), retries=0)
    )
    with pytest.raises(StorageError) as caught:
        account.get("weights", "x")
    assert caught.value.code == "STORAGE-TLS"
