"""Where a plan runs: paths, addresses and credentials of one machine, or of a cluster.

The compiler is one; what differs between a laptop and AKS is only what a `Site` answers
(`graphs.render.site.ClusterSite` answers for a cluster).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from components.common.storage.config import AccountConfig, CredentialConfig
from graphs.plan import Volume
from graphs.sockets import socket_directory
from graphs.spec import AccountSpec, ClusterSpec, GraphSpec, TrustSpec

LOOPBACK = "127.0.0.1"
EMBEDDED_ACCOUNTS = {"weights": "dbweights", "kv": "dbkv"}

# Offsets from network.base_port; fixed ranges, so that scaling one component moves no other's port.
OFFSETS = {
    "dynamo-frontend": 0, "azurite": 4, "etcd": 5, "nats": 7, "router": 8, "weights": 12, "frontend": 16, "events": 18,
    "prefill": 20, "decode": 28, "aggregated": 36, "nixl-prefill": 44, "nixl-decode": 52, "nixl-aggregated": 60, "sweeper": 68,
}  # fmt: skip
LOCAL_REPLICAS = {
    "dynamo-frontend": 4,
    "router": 4,
    "weights": 4,
    "frontend": 4,
    "prefill": 8,
    "decode": 8,
    "aggregated": 8,
    "sweeper": 2,
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
        return socket_directory(self.run)

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

    def engine_sockets(self) -> str:
        """Directory for sockets that an engine makes for itself; empty = the process's own temporary directory."""
        return str(self.sockets)

    def unix(self, name: str) -> str:
        return f"unix:{self.sockets / name}"

    # -- what a cluster answers otherwise

    def host(self, spec: GraphSpec) -> str:
        """Address at which others reach a process of ours; stands in environments."""
        return spec.network.host

    def bind(self, spec: GraphSpec) -> str:
        """Address to listen on for other processes."""
        return spec.network.host

    def namespace(self, spec: GraphSpec) -> str:
        return spec.namespace

    def embedded(self, spec: GraphSpec) -> bool:
        """Whether the store is a process of the graph."""
        return spec.storage.embedded == "azurite"

    def cluster_of(self, spec: GraphSpec) -> ClusterSpec | None:
        """What renderers are told of the cluster."""
        return spec.cluster

    def trust(self, spec: GraphSpec) -> TrustSpec | None:
        return spec.trust

    def discovery(self, spec: GraphSpec) -> Literal["file", "etcd", "kubernetes"]:
        return spec.runtime.discovery

    def gateway_listen(self, spec: GraphSpec, replica: int) -> tuple[str, int]:
        host, _, number = spec.components.frontend.listen.rpartition(":")
        return host, int(number) if replica == 0 else self.port(spec, "frontend", replica)

    def upstreams(self, spec: GraphSpec, replica: int) -> list[str]:
        """Dynamo's frontends that gateway `replica` uses in turn, those that are away left out."""
        count = max(1, spec.components.dynamo_frontend.replicas) if self.kind == "local" else 1  # a pod has its own
        ports = [self.port(spec, "dynamo-frontend", (replica + n) % count) for n in range(count)]
        return [f"http://{LOOPBACK}:{port}" for port in ports]

    def gateway_ops_listen(self, spec: GraphSpec) -> str:
        """/metrics and /debug apart from the API; empty = on the API's own port."""
        return ""

    def weights_listen(self, spec: GraphSpec, replica: int) -> str:
        return self.unix(f"weights-{replica}.sock")

    def weights_service(self, spec: GraphSpec, consumer: str, replica: int) -> str:
        """The weight service that replica `replica` of `consumer` asks; empty = none, it reads Blob itself."""
        count = spec.components.weights.replicas
        return self.unix(f"weights-{replica % count}.sock") if count else ""

    def weights_uid(self, spec: GraphSpec) -> int:
        """Whom a worker expects behind the weight service's socket; -1 = its own user."""
        return -1

    def weights_peers(self, spec: GraphSpec, replica: int) -> tuple[str, ...]:
        others = (j for j in range(spec.components.weights.replicas) if j != replica)
        return tuple(self.weights_listen(spec, j) for j in others)

    def cache_dir(self, spec: GraphSpec, replica: int) -> str:
        """Node cache that weight service `replica` writes; empty = none."""
        return str(self.shm / "cache" / str(replica)) if spec.components.weights.cache_bytes else ""

    def cache_host_path(self, spec: GraphSpec) -> str:
        """Where the node has the cache, when processes see it elsewhere."""
        return ""

    def node_volumes(self, spec: GraphSpec, component: str, replica: int) -> tuple[Volume, ...]:
        """Directories of the node beyond the cache that processes meet in."""
        return ()

    def router_listen(self, spec: GraphSpec, replica: int) -> str:
        return self.unix(f"router-{replica}.sock")

    def router_address(self, spec: GraphSpec, replica: int) -> str:
        """The router that gateway `replica` asks; empty = none."""
        router = spec.components.router
        return self.router_listen(spec, replica % router.replicas) if router and router.replicas else ""

    def tenants_file(self, graph_file: str, path: str) -> str:
        """A path of the graph file as an absolute path; empty stays empty."""
        return str((Path(graph_file).parent / path).resolve()) if path else ""

    def event_broker(self, spec: GraphSpec) -> tuple[str, str] | None:
        """(address for publishers, address for subscribers) of the graph's event broker; None = publishers bind themselves."""
        if self.kind != "local" or spec.runtime.event_plane != "zmq" or not spec.runtime.event_broker:
            return None
        first = self.port(spec, "events")
        return f"tcp://{LOOPBACK}:{first}", f"tcp://{LOOPBACK}:{first + 1}"

    def preload(self) -> str:
        """torch's own OpenMP runtime, for workers of the CPU build: two runtimes in one process were measured four
        times slower. Empty where torch brings none. The worker would re-execute itself with it; here it stands in the plan."""
        spec = importlib.util.find_spec("torch")
        if (
            self.kind != "local"
            or spec is None
            or spec.origin is None
            or not importlib.metadata.version("torch").endswith("+cpu")
        ):
            return ""
        return str(next(iter(sorted((Path(spec.origin).parent / "lib").glob("libgomp*"))), ""))

    def gpu_env(self, first: int, count: int) -> dict[str, str]:
        """Which GPUs of the machine a process may use."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + count)))}
