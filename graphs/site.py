"""Where a plan runs: paths, addresses and credentials of one machine, or of a cluster.

The compiler is one; what differs between a laptop and AKS is only what a `Site` answers.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

from components.common.storage.config import AccountConfig, CredentialConfig
from graphs.spec import AccountSpec, GraphSpec

LOOPBACK = "127.0.0.1"
EMBEDDED_ACCOUNTS = {"weights": "dbweights", "kv": "dbkv"}

# Offsets from network.base_port; fixed ranges, so that scaling one component moves no other's port.
OFFSETS = {
    "dynamo-frontend": 0, "azurite": 4, "etcd": 5, "nats": 7, "router": 8, "weights": 12, "frontend": 16,
    "prefill": 20, "decode": 28, "aggregated": 36, "nixl-prefill": 44, "nixl-decode": 52, "nixl-aggregated": 60,
}  # fmt: skip
LOCAL_REPLICAS = {
    "dynamo-frontend": 4,
    "router": 4,
    "weights": 4,
    "frontend": 4,
    "prefill": 8,
    "decode": 8,
    "aggregated": 8,
}


@dataclass(frozen=True)
class Release:
    """What is known of the release when the plan is made. Empty digests = not published or not resolved yet."""

    version: str = ""
    manifest_digest: str = ""
    weights_digest: str = ""
    publisher_keys: tuple[str, ...] = ()
    approver_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Site:
    """One machine. `state` outlives runs (store, small files of releases); `run` belongs to one run."""

    run: Path
    state: Path
    release: Release = field(default_factory=Release)
    python: str = sys.executable
    kind: str = "local"

    @property
    def sockets(self) -> Path:
        return self.run / "s"

    @property
    def shm(self) -> Path:
        return Path("/dev/shm") / f"dynamo-blob-{hashlib.blake2b(str(self.run).encode(), digest_size=6).hexdigest()}"

    @property
    def weights_root(self) -> Path:
        return self.state / "weights"

    def port(self, spec: GraphSpec, component: str, replica: int = 0) -> int:
        return spec.network.base_port + OFFSETS[component] + replica

    def account_key(self, account: str) -> Path:
        """File with the key of one embedded account."""
        return self.state / "keys" / f"{account}.key"

    def credential(self, identity: str, role: str) -> Path:
        """SAS file of one identity for one account."""
        return self.run / "credentials" / f"{identity}.{role}.json"

    def account_url(self, spec: GraphSpec, role: str) -> str:
        own = getattr(spec.storage, role)
        if own.url or spec.storage.embedded == "none":
            return str(own.url)
        return f"http://{LOOPBACK}:{self.port(spec, 'azurite')}/{EMBEDDED_ACCOUNTS[role]}"

    def account(self, spec: GraphSpec, role: str, identity: str) -> AccountConfig:
        own: AccountSpec = getattr(spec.storage, role)
        if own.url:
            entra = CredentialConfig(kind="entra")
            credential = CredentialConfig(kind="sas_file", path=own.sas_file) if own.sas_file else entra
        else:
            credential = CredentialConfig(kind="sas_file", path=str(self.credential(identity, role)))
        return AccountConfig(url=self.account_url(spec, role), credential=credential)

    def unix(self, name: str) -> str:
        return f"unix:{self.sockets / name}"
