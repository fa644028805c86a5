"""The cluster as a site: what the compiler is told instead of one machine's paths and addresses.

Every pod has its own network and run directory, so replicas of a component are equal up to their number:
the renderers collapse them to one template with a replica count, and refuse when they are not equal.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from components.common.errors import DynamoBlobError
from components.common.storage.config import AccountConfig, CredentialConfig
from graphs.plan import Volume
from graphs.site import Site
from graphs.spec import ClusterSpec, GraphSpec, TrustSpec

POD_IP = "$(POD_IP)"
"""Expanded by the kubelet: the renderer defines POD_IP before every variable that uses it."""

SYSTEM_PORT = 9090  # the operator's probes of workers
GATEWAY_PORT, FRONTEND_PORT = 8000, 8001  # the operator's service of a frontend targets 8000
ROUTER_PORT, NIXL_PORT = 8200, 5600
ROUTER_HEALTH_PORT = 9091  # 9090 is taken by the Dynamo runtime inside the router: the operator switches it on
PORTS = {
    "frontend": GATEWAY_PORT, "dynamo-frontend": FRONTEND_PORT, "router": ROUTER_HEALTH_PORT,
    "prefill": SYSTEM_PORT, "decode": SYSTEM_PORT, "aggregated": SYSTEM_PORT, "sweeper": SYSTEM_PORT, "etcd": 2379, "nats": 4222,
}  # fmt: skip
RUN, STATE, TENANTS = Path("/run/dynamo-blob"), Path("/var/lib/dynamo-blob"), Path("/etc/dynamo-blob/tenants")
WORKER_UID, WEIGHTS_UID, SHARED_GID = 64124, 64123, 64123
"""Cache files belong to the weight service's user; workers are another one, in the group that may use its socket."""
CACHE, NODE_RUN = Path("/var/cache/dynamo-blob"), Path("/run/dynamo-blob-node")
PYTHON = "python3"


@dataclasses.dataclass(frozen=True)
class ClusterSite(Site):
    """`cluster` says what the graph itself leaves to a cluster."""

    kind: str = "aks"
    cluster: ClusterSpec = dataclasses.field(default_factory=ClusterSpec)

    def engine_sockets(self) -> str:
        return ""  # a pod's own

    def port(self, spec: GraphSpec, component: str, replica: int = 0) -> int:
        return NIXL_PORT if component.startswith("nixl-") else PORTS[component]

    def account_url(self, spec: GraphSpec, role: str) -> str:
        url: str = getattr(spec.storage, role).url or getattr(self.cluster.accounts, role)
        if not url:
            raise DynamoBlobError(
                "RENDER-NO-ACCOUNT", f"the cluster has no {role} account", where=f"cluster.accounts.{role}",
                why="the embedded store is a process of one machine", do="name https://ACCOUNT.blob.core.windows.net",
            )  # fmt: skip
        return url.rstrip("/")

    def account(self, spec: GraphSpec, role: str, identity: str) -> AccountConfig:
        """Workload identity: no credential stands anywhere; the pod's service account is the identity."""
        credential = CredentialConfig(kind="entra", chain=("workload_identity",))
        return AccountConfig(url=self.account_url(spec, role), credential=credential)

    def host(self, spec: GraphSpec) -> str:
        return POD_IP

    def bind(self, spec: GraphSpec) -> str:
        return "0.0.0.0"

    def namespace(self, spec: GraphSpec) -> str:
        """The operator's rule: {Kubernetes namespace}-{deployment}."""
        return f"{self.cluster.namespace}-{spec.graph}"

    def discovery(self, spec: GraphSpec) -> Literal["file", "etcd", "kubernetes"]:
        return "etcd" if spec.runtime.discovery == "etcd" else "kubernetes"

    def embedded(self, spec: GraphSpec) -> bool:
        return False

    def cluster_of(self, spec: GraphSpec) -> ClusterSpec | None:
        return self.cluster

    def trust(self, spec: GraphSpec) -> TrustSpec | None:
        own = spec.trust if spec.trust and spec.trust.require != "local" else None
        return own or self.cluster.trust

    def gateway_listen(self, spec: GraphSpec, replica: int) -> tuple[str, int]:
        return "0.0.0.0", GATEWAY_PORT

    def gateway_ops_listen(self, spec: GraphSpec) -> str:
        return f"0.0.0.0:{SYSTEM_PORT}"

    def weights_listen(self, spec: GraphSpec, replica: int) -> str:
        return f"unix:{NODE_RUN}/weights.sock"

    def weights_service(self, spec: GraphSpec, consumer: str, replica: int) -> str:
        """Workers ask the service of their own node; gateways run where there may be none and read a few MB of Blob."""
        on_node = consumer != "frontend" and spec.components.weights.replicas > 0
        return self.weights_listen(spec, 0) if on_node else ""

    def weights_uid(self, spec: GraphSpec) -> int:
        return WEIGHTS_UID

    def weights_peers(self, spec: GraphSpec, replica: int) -> tuple[str, ...]:
        return ()

    def cache_dir(self, spec: GraphSpec, replica: int) -> str:
        return str(CACHE) if spec.components.weights.cache_bytes else ""

    def cache_host_path(self, spec: GraphSpec) -> str:
        return f"{self.cluster.cache_host_path}/{spec.graph}"

    def node_volumes(self, spec: GraphSpec, component: str, replica: int) -> tuple[Volume, ...]:
        if component != "weights" and not spec.components.weights.replicas:
            return ()
        return (
            Volume(
                name="weights-socket", path=str(NODE_RUN), shared=True, node=True, read_only=component != "weights",
                host_path=f"{self.cluster.node_run_path}/{spec.graph}",
            ),
        )  # fmt: skip

    def router_listen(self, spec: GraphSpec, replica: int) -> str:
        return f"0.0.0.0:{ROUTER_PORT}"

    def router_address(self, spec: GraphSpec, replica: int) -> str:
        router = spec.components.router
        return f"http://{spec.graph}-router-decide:{ROUTER_PORT}" if router and router.replicas else ""

    def tenants_file(self, graph_file: str, path: str) -> str:
        return str(TENANTS / Path(path).name) if path else ""

    def gpu_env(self, first: int, count: int) -> dict[str, str]:
        return {}  # the device plugin says


def cluster_site(spec: GraphSpec, cluster: ClusterSpec) -> ClusterSite:
    return ClusterSite(run=RUN, state=STATE, python=PYTHON, cluster=cluster)
