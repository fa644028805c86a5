"""The graph file as typed models. Strict: unknown keys and wrong types are refused with file:line:column.

A graph names a model release, the storage accounts, the runtime planes and the components with
replicas, resources, profiles and links. It holds no secret. `dynamo schema` exports the JSON Schema.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from components.common.errors import DynamoBlobError

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?$")
_UNIT = {None: 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


MOST_BYTES = 2**60


def parse_size(value: object) -> object:
    """Bytes from ``2GiB``, ``512 MB`` or an integer; other types are left to pydantic's refusal."""
    if not isinstance(value, str):
        return value
    found = _SIZE.match(value.strip())
    if not found:
        raise ValueError(f"'{value}' is not a size; write 512MiB, 2GiB or a number of bytes")
    size = float(found[1]) * _UNIT[found[2]]
    if size > MOST_BYTES:
        raise ValueError("more than 1 EiB; no machine has that")
    return int(size)


_SIZE_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SIZE.pattern}]}
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=MOST_BYTES), WithJsonSchema(_SIZE_SCHEMA)]
_CIDR = r"^(\d{1,3}(\.\d{1,3}){3}/\d{1,2}|[0-9a-fA-F:]+/\d{1,3})?$"


def parse_cidr(value: object) -> object:
    """Refuses what the API server would refuse in a network policy: 10.0.0.0/64, 10.0.0.256/28."""
    if isinstance(value, str) and value:
        try:
            ipaddress.ip_network(value, strict=False)
        except ValueError as e:
            raise ValueError(f"{e}; write addresses as 10.1.2.0/28") from None
    return value


Cidr = Annotated[str, Field(pattern=_CIDR), AfterValidator(parse_cidr)]
_LISTEN = r"^[^\s/]+:\d{1,5}$"


def parse_listen(value: object) -> object:
    """``host:port`` unchanged; refused unless the port is one that can be listened on."""
    if not (isinstance(value, str) and re.match(_LISTEN, value) and 0 < int(value.rpartition(":")[2]) < 65536):
        raise ValueError("write host:port with a port from 1 to 65535, e.g. 127.0.0.1:8000")
    return value


Listen = Annotated[str, BeforeValidator(parse_listen), WithJsonSchema({"type": "string", "pattern": _LISTEN})]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")]


class Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


class ModelSpec(Spec):
    """The release that is served."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$", description="model name in the registry")
    version: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._+-]{0,64}$",
        description="version; empty = what `channel` points to when the graph starts",
    )
    channel: Literal["current", "previous"] = Field("current", description="used when no version is given")
    served_as: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127})?$",
        description="name clients use; empty = `name`",
    )
    manifest_digest: str = Field(
        "", pattern=r"^([0-9a-f]{64})?$", description="blake3 of the manifest; when given nothing else is served"
    )
    weights_digest: str = Field(
        "",
        pattern=r"^([0-9a-f]{64})?$",
        description="digest of the weights; known after publishing, pinned for clusters",
    )
    source: str = Field(
        "", description="embedded store only: sample:NAME or a directory, published when the release is missing"
    )


class TrustSpec(Spec):
    """Which signatures serving accepts."""

    require: Literal["none", "signature", "approval", "local"] = Field(
        "approval",
        description="local = approval by keys that `serve` makes on this machine (embedded store only); none = digests alone",
    )
    publisher_keys: list[str] = Field([], description="Ed25519 public keys accepted on manifests, hex")
    approver_keys: list[str] = Field([], description="Ed25519 public keys accepted on approvals, hex")


class AccountSpec(Spec):
    """One storage account. Credentials never stand here: SAS files locally, workload identity in a cluster."""

    url: str = Field("", description="https://ACCOUNT.blob.core.windows.net; empty = the embedded store")
    container: str = Field(
        pattern=r"^[a-z0-9](-?[a-z0-9]){2,62}$",
        description="container (kv: of retention classes that name none)",
    )
    sas_file: str = Field(
        "", description="file with a SAS when `serve` runs against a real account; empty = azure-identity"
    )


class StorageSpec(Spec):
    embedded: Literal["azurite", "none"] = Field(
        "none", description="azurite = a local stand-in started with the graph"
    )
    weights: AccountSpec = AccountSpec(container="weights")
    kv: AccountSpec = AccountSpec(container="kv-default")


class EngineSpec(Spec):
    kind: Literal["vllm", "mock"] = Field(
        "vllm", description="mock = fake engine with prefix cache and KV events, for tests of everything else"
    )
    profile: str = Field(description="configs/engine/<profile>.yaml")
    set: dict[str, Any] = Field({}, description="values of the profile's `engine` to replace")
    loader: Literal["dynamo_blob", "auto", "runai_streamer", "modelexpress"] = Field(
        "dynamo_blob", description="others do not verify: they need allow_unverified"
    )
    allow_unverified: bool = Field(False, description="accept a loader that does not verify; `status` shows it")
    mock_token_ms: float = Field(0.0, ge=0, le=60_000, description="mock only: milliseconds per token")


class KvSpec(Spec):
    profile: str = Field(description="configs/kv/<profile>.yaml")
    set: dict[str, Any] = Field({}, description="values of the profile's `settings` to replace")
    overlap: bool = Field(
        False, description="compute a prompt's front while its back loads, where the cost model says that it wins"
    )


class RuntimeSpec(Spec):
    """Dynamo's planes."""

    namespace: str = Field("", pattern=r"^[a-z0-9_-]{0,63}$", description="Dynamo namespace; empty = the graph's name")
    discovery: Literal["file", "etcd", "kubernetes"] = Field(
        "file", description="file needs no service; etcd is started with the graph unless etcd_url is given"
    )
    request_plane: Literal["tcp", "nats"] = "tcp"
    event_plane: Literal["zmq", "nats"] = Field(
        "zmq", description="carries KV events; nats binds loopback only, zmq binds every interface"
    )
    event_broker: bool = Field(
        True,
        description="on one machine with zmq: relay events through a broker on loopback; false = every publisher binds a port on every interface",
    )
    etcd_url: str = Field("", description="http://host:port of an etcd that runs already")
    nats_url: str = Field("", description="nats://host:port of a NATS server that runs already")
    migration_limit: int = Field(
        3, ge=0, le=16, description="times a request may move to another worker when its worker dies"
    )
    hash_seed: str = Field("0", description="PYTHONHASHSEED of every worker: equal seeds, equal block hashes")
    log: str = Field("warn", pattern=r"^[A-Za-z0-9_=,:./-]{0,500}$", description="DYN_LOG of every Dynamo process")


class NetworkSpec(Spec):
    host: str = Field(
        "127.0.0.1",
        description="address everything but the gateway listens on; loopback unless the graph says otherwise",
    )
    base_port: int = Field(
        8100,
        ge=1024,
        le=32600,
        description="first of the ports the plan gives out; Dynamo takes no system port above 32767",
    )


class ComponentSpec(Spec):
    replicas: int = Field(1, ge=0, le=64)
    memory: Size = Field(0, description="memory limit, bytes; 0 = what the plan expects")
    cpus: float = Field(0.0, ge=0, description="CPU request; 0 = not stated")
    env: dict[str, Annotated[str, Field(pattern=r"^[^\x00]*$")]] = Field(
        {}, description="further environment variables; values are strings"
    )
    drain_s: float = Field(30.0, ge=0, le=3600, description="seconds answers in flight may finish in on SIGTERM")
    grace_s: float = Field(
        0.0,
        ge=0,
        description="seconds between SIGTERM and SIGKILL (cluster: terminationGracePeriodSeconds); 0 = drain + 30",
    )
    restarts: int = Field(
        3,
        ge=0,
        le=100,
        description="restarts within two minutes; beyond them the graph has failed, or, where it serves without, this process alone",
    )
    frozen_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="one machine: seconds without any answer after which a process that was ready is killed and restarted; 0 = never",
    )


class FrontendSpec(ComponentSpec):
    listen: Listen = Field("127.0.0.1:8000", description="host:port of the OpenAI API")
    auth: Literal["keys", "none"] = Field("keys", description="none is for loopback only")
    tenants_file: str = Field("", description="YAML of tenants with hashed keys, relative to the graph file")
    max_body: Size = Field(8 * 2**20, description="largest request body, bytes")
    max_concurrent: int = Field(256, gt=0, description="requests in flight; more = 429")


class RouterSpec(ComponentSpec):
    decide_deadline_ms: float = Field(
        50.0, gt=0, description="milliseconds the gateway waits for a decision; late = no pin"
    )
    block_size: int = Field(0, ge=0, description="tokens per block; 0 = the engine's, anything else must equal it")
    host_hit_weight: float = Field(0.75, ge=0, le=1, description="credit of a block in a worker's DRAM, 1 = in HBM")
    blob_hit_weight: float = Field(0.25, ge=0, le=1, description="credit of a block in Blob")


class WeightsSpec(ComponentSpec):
    cache_bytes: Size = Field(0, description="node cache on tmpfs, bytes; 0 = none")
    on_outage: Literal["wait", "use_cache", "keep_warm_replicas", "fail"] = Field(
        "use_cache", description="when neither service nor store answers"
    )
    budget_bytes: Size = Field(2 * 2**30, description="host memory of one worker's load in flight, bytes")


class SweeperSpec(ComponentSpec):
    """Deletes from the KV containers what is over; runs where a worker keeps KV in Blob. ``replicas: 0`` switches it off."""

    sweep_s: float = Field(60.0, gt=0, description="seconds between sweeps; budgets are overrun by what is put in one")
    relist_s: float = Field(900.0, gt=0, description="seconds between full listings of the KV containers")
    total_bytes: Size = Field(0, description="bytes over all retention classes; 0 = the classes' own budgets only")
    capacity: int = Field(2**20, gt=0, description="objects its catalogue holds; memory is about 82 bytes each")


class WorkerSpec(ComponentSpec):
    gpus: int = Field(0, ge=0, le=8, description="GPUs per replica; must equal tensor x pipeline parallel size")
    engine: dict[str, Any] = Field({}, description="values of the profile's `engine` for this component alone")
    kv: KvSpec | None = Field(None, description="KV tiers of this component alone")
    version: str = Field(
        "", description="another version of the model than the graph's (a canary); linked workers must agree"
    )
    shm: Size = Field(0, description="shared memory, bytes; 0 = the plan's estimate")
    nixl_backends: list[str] = Field(
        ["UCX"], min_length=1, description="NIXL back ends of the prefill => decode handover"
    )


class ComponentsSpec(Spec):
    frontend: FrontendSpec = FrontendSpec()
    dynamo_frontend: ComponentSpec = ComponentSpec(drain_s=10.0)
    router: RouterSpec | None = None
    weights: WeightsSpec = WeightsSpec()
    prefill: WorkerSpec | None = None
    decode: WorkerSpec | None = None
    aggregated: WorkerSpec | None = None
    sweeper: SweeperSpec = SweeperSpec(drain_s=10.0)


class LinkSpec(Spec):
    """``from -> to``: what talks to what; empty list in the graph = the usual links."""

    source: str = Field(alias="from")
    to: str
    kind: Literal["requests", "decisions", "kv", "weights"]


class NodeSpec(Spec):
    """The machine a replica of each component must fit on (`check`); zero = not checked."""

    memory: Size = 0
    gpus: int = Field(0, ge=0)
    shm: Size = 0


class IdentitySpec(Spec):
    """A user-assigned identity and the service account that carries it."""

    client_id: str = Field(
        "",
        pattern=r"^([0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})?$",
        description="not its name, nor its object id",
    )
    service_account: str = ""


class ClusterAccounts(Spec):
    """Storage accounts of the cluster, for graphs whose own accounts are the embedded store."""

    weights: str = Field("", pattern=r"^(https://[a-z0-9.-]+)?$", description="https://ACCOUNT.blob.core.windows.net")
    kv: str = Field("", pattern=r"^(https://[a-z0-9.-]+)?$", description="a second account, without versions")


class ClusterSpec(Spec):
    """What a cluster needs beyond the graph (`dynamo render`): in the graph, or in a file of its own (``--cluster``)."""

    namespace: str = Field("inference", pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    images: dict[
        Literal[
            "default", "frontend", "dynamo-frontend", "prefill", "decode", "aggregated", "router", "weights", "sweeper"
        ],
        str,
    ] = Field({}, description="component -> image pinned by digest; `default` for the rest")
    dynamo_version: str = Field("1.6.1", pattern=r"^\d+\.\d+\.\d+$", description="runtimeVersionOverride")
    accounts: ClusterAccounts = ClusterAccounts()
    trust: TrustSpec | None = Field(None, description="used when the graph names none: keys whose approvals count")
    identities: dict[Literal["serving", "weights", "publisher", "approver"], IdentitySpec] = Field(
        {}, description="publisher and approver are named only so that admission can refuse them among serving pods"
    )
    region: str = ""
    node_selector: dict[str, str] = Field({}, description="nodes of workers and of the weight service")
    gpu_resource: str = Field("nvidia.com/gpu", description="resource name of the GPU device plugin")
    extra_resources: dict[str, int] = Field(
        {}, description="further resources of each worker with GPUs, e.g. {rdma/hca_shared_devices_a: 1}"
    )
    termination_grace_s: float = Field(
        120.0, gt=0, description="terminationGracePeriodSeconds; must exceed every drain"
    )
    cache_host_path: str = Field(
        "/dev/shm/dynamo-blob/cache",
        pattern=r"^/[A-Za-z0-9._/-]+$",
        description="tmpfs of the node, written by the weight service, mapped read-only by workers",
    )
    node_run_path: str = Field(
        "/run/dynamo-blob-node",
        pattern=r"^/[A-Za-z0-9._/-]+$",
        description="directory of the node with the weight service's socket",
    )
    cache_mode: Literal["hostpath", "sidecar"] = Field("hostpath", description="sidecar where hostPath is forbidden")
    private_endpoint_cidr: Cidr = Field(
        "", description="addresses of the storage private endpoints, for the network policy"
    )
    api_server_cidr: Cidr = Field("", description="address of the Kubernetes API server, which discovery talks to")
    identity_cidrs: list[Cidr] = Field(
        ["20.20.32.0/19", "20.190.128.0/18", "20.231.128.0/19", "40.126.0.0/18"],
        description="addresses of Entra ID, where identities become tokens (Microsoft 365 endpoints, id 56)",
    )
    gateway_from: list[str] = Field(
        [], description="namespaces whose pods may call the API beside the graph's own; empty = the graph's own alone"
    )
    monitoring_namespace: str = Field("monitoring", description="namespace whose pods may read metrics; empty = none")


class GraphSpec(Spec):
    graph: Name = Field(description="name of the graph")
    description: str = ""
    model: ModelSpec
    trust: TrustSpec | None = Field(None, description="absent = local keys with the embedded store, approval elsewhere")
    storage: StorageSpec = StorageSpec(embedded="azurite")
    engine: EngineSpec
    kv: KvSpec | None = Field(None, description="KV tiers of every worker; absent = HBM and handover only")
    runtime: RuntimeSpec = RuntimeSpec()
    network: NetworkSpec = NetworkSpec()
    components: ComponentsSpec
    links: list[LinkSpec] = []
    node: NodeSpec = NodeSpec()
    cluster: ClusterSpec | None = None

    @property
    def served_model(self) -> str:
        return self.model.served_as or self.model.name

    @property
    def namespace(self) -> str:
        return self.runtime.namespace or self.graph


def json_schema() -> dict[str, Any]:
    """JSON Schema of the graph file, for editors (``# yaml-language-server: $schema=...``)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **GraphSpec.model_json_schema(by_alias=True)}


def graph_error(what: str, where: str, why: str = "", do: str = "", code: str = "GRAPH-INVALID") -> DynamoBlobError:
    return DynamoBlobError(code, what, where=where, why=why, do=do)
