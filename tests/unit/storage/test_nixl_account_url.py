"""NIXL's AZURE_BLOB with `account_url` and `ca_bundle`, as on AKS: against Azurite over https that wants Entra tokens.

The plugin (NIXL 1.4.1) takes tokens from its own DefaultAzureCredential. Its blob client trusts `ca_bundle`; the client
that fetches the token does not: that one reads /etc/pki/tls/certs/ca-bundle.crt only, where Debian and Ubuntu have nothing.
Each call is in a process of its own, because the plugin's retries (6 s) cannot be ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.common.storage.azurite import log_records
from tests.registry_store import REPOSITORY, Store, start, stop
from tests.tls import write_certificate
from tests.unit.storage.test_entra import TENANT, Tokens

pytestmark = pytest.mark.slow
SYSTEM_CA = Path("/etc/pki/tls/certs/ca-bundle.crt")
DATA = bytes(range(256)) * 40
CHILD = """
import json, sys, torch
from nixl._api import nixl_agent, nixl_agent_config
from components.common.kv.stores import connection
from components.common.storage.account import Account
from components.common.storage.config import AccountConfig
given = json.loads(sys.argv[1])
params = dict(connection(Account(AccountConfig.model_validate(given["account"])), "box").params)
if not given["ca"]:
    params.pop("ca_bundle")
assert "account_url" in params and "connection_string" not in params
agent = nixl_agent("a", nixl_agent_config(backends=[]))
agent.create_backend("AZURE_BLOB", params | {"num_threads": "1"})
buffer = torch.zeros(10240, dtype=torch.uint8)
agent.register_memory(buffer)
def move(op, name, devid):
    remote = agent.register_memory([(0, 10240, devid, name)], "OBJ")
    handle = agent.initialize_xfer(op, agent.get_xfer_descs([(buffer.data_ptr(), 10240, 0)], "DRAM"), remote.trim(), "a")
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    return state
out = {}
try:
    out["read"] = move("READ", "x", 1)
    out["same"] = bytes(buffer.tolist()) == bytes(range(256)) * 40
    out["write"] = move("WRITE", "y", 2)
    out["query"] = [x is not None for x in agent.query_memory([(0, 1, 0, "x"), (0, 1, 0, "nope")], "AZURE_BLOB", "OBJ")]
except Exception as e:
    out["error"] = type(e).__name__
print(json.dumps(out), flush=True)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("nixl")
    cert, key = write_certificate(root)
    running = start(root, in_memory=True, cert=str(cert), key=str(key), oauth=True)
    owner = running.account()
    owner.ensure_container("box")
    owner.put("box", "x", DATA)
    yield running
    stop(running)


@pytest.fixture(scope="module")
def tokens(store: Store) -> Iterator[Tokens]:
    served = Tokens(store.root / "cert.pem", store.root / "key.pem")
    yield served
    served.server.shutdown()


def nixl(
    store: Store, env: dict[str, str], *, ca: bool = True, before: tuple[str, ...] = ()
) -> tuple[dict[str, object], str]:
    """(what the child saw, its stderr)."""
    account = {"url": store.config.url("weights"), "credential": {"kind": "entra"}, "ca_bundle": str(store.root / "cert.pem")}  # fmt: skip
    clean = {k: v for k, v in os.environ.items() if not k.startswith("AZURE_")}
    argv = [*before, sys.executable, "-c", CHILD, json.dumps({"account": account, "ca": ca})]
    done = subprocess.run(
        argv, cwd=REPOSITORY, env=clean | {"PYTHONPATH": str(REPOSITORY)} | env, capture_output=True, text=True, timeout=150
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def azure_cli(store: Store, tokens: Tokens) -> dict[str, str]:
    """An environment whose `az` hands out a token: the last member of the chain, and the only one without TLS of its own."""
    token = {"accessToken": tokens.token()["access_token"], "expires_on": int(time.time()) + 3600, "tenant": TENANT}
    token |= {"expiresOn": time.strftime("%Y-%m-%d %H:%M:%S.000000", time.localtime(time.time() + 3600)), "tokenType": "Bearer"}  # fmt: skip
    (store.root / "token.json").write_text(json.dumps(token))
    az = store.root / "bin" / "az"
    az.parent.mkdir(exist_ok=True)
    az.write_text(f"#!/bin/sh\ncat {store.root / 'token.json'}\n")
    az.chmod(0o755)
    return {"PATH": f"{az.parent}:{os.environ['PATH']}"}


def workload_identity(store: Store, tokens: Tokens) -> dict[str, str]:
    (store.root / "federated").write_text("kubernetes-service-account-token")
    return {
        "AZURE_AUTHORITY_HOST": f"https://127.0.0.1:{tokens.server.server_port}", "AZURE_TENANT_ID": TENANT, "AZURE_CLIENT_ID": "c",
        "AZURE_FEDERATED_TOKEN_FILE": str(store.root / "federated"),
    }  # fmt: skip


WORKS = {"read": "DONE", "same": True, "write": "DONE", "query": [True, False]}


def test_account_url_with_a_ca_bundle_reads_writes_and_asks(store: Store, tokens: Tokens) -> None:
    found, _ = nixl(store, azure_cli(store, tokens))
    assert found == WORKS
    rows = [r for r in log_records(store.log) if r["path"].endswith("/box/x") and r["range"]]
    assert rows and rows[-1]["status"] == 206 and rows[-1]["body"] == len(DATA)


def test_without_the_ca_bundle_it_is_refused(store: Store, tokens: Tokens) -> None:
    """Negative control: it is `ca_bundle` that makes the store trusted."""
    found, said = nixl(store, azure_cli(store, tokens), ca=False)
    assert found == {"error": "nixlBackendError"} and "self-signed certificate" in said


@pytest.mark.skipif(SYSTEM_CA.exists(), reason="this system has the bundle that the plugin's token client reads")
def test_workload_identity_gets_no_token_where_the_ca_file_is_missing(store: Store, tokens: Tokens) -> None:
    """Why the image must provide /etc/pki/tls/certs/ca-bundle.crt. SSL_CERT_FILE and CURL_CA_BUNDLE do not help."""
    before = len(tokens.requests)
    ca = str(store.root / "cert.pem")
    env = workload_identity(store, tokens) | {"SSL_CERT_FILE": ca, "CURL_CA_BUNDLE": ca}
    found, said = nixl(store, env)
    assert found == {"error": "nixlBackendError"} and "Failed to get token from DefaultAzureCredential" in said
    assert len(tokens.requests) == before, "it never reached the token endpoint"


def test_workload_identity_works_where_it_is(store: Store, tokens: Tokens) -> None:
    """The same with our CA at that path, in a mount namespace of the child's own."""
    over = store.root / "over"
    over.mkdir()
    layers = f"lowerdir=/etc,upperdir={over}/u,workdir={over}/w"
    script = (
        f"mount -t tmpfs t {over} && mkdir {over}/u {over}/w && mount -t overlay -o {layers} overlay /etc && "
        f'mkdir -p {SYSTEM_CA.parent} && cp {store.root}/cert.pem {SYSTEM_CA} && exec "$@"'
    )
    shell = ("unshare", "-m", "sh", "-c", script, "sh")
    if subprocess.run([*shell, "true"], capture_output=True).returncode:
        pytest.skip("no right to a mount namespace here")
    before = len(tokens.requests)
    found, _ = nixl(store, workload_identity(store, tokens), before=shell)
    assert found == WORKS and len(tokens.requests) == before + 1
