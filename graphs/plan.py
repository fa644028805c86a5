"""The compiled plan: everything that runs, as data. Launcher and renderers consume only this.

A plan holds no secret: credentials are paths of files (local) or an identity (cluster).
It is stable: the same graph and release compile to the same plan, whatever the machine,
up to the run directory and ports.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from components.common.config import Config


class Port(Config):
    name: str
    number: int = Field(gt=0, lt=65536)
    host: str = Field("127.0.0.1", description="address it listens on")
    purpose: str = ""


class Probe(Config):
    """When a process counts as ready. Exactly one of the targets is set."""

    http: str = Field("", description="URL that answers 200 when ready")
    unix_http: str = Field("", description="unix:/path:/url-path that answers 200 when ready")
    model: str = Field("", description="URL of /v1/models that must list `expect`")
    expect: str = ""
    answers: str = Field("", description="URL that answers anything at all when ready")
    zmtp: str = Field("", description="host:port of a ZeroMQ socket, which greets when ready")
    timeout_s: float = Field(
        2.0, gt=0, description="seconds one probe may take; the gateway's asks the engines for a token"
    )
    deadline_s: float = Field(180.0, gt=0, description="seconds from start to ready before the start has failed")


class Volume(Config):
    """A directory a process needs beside its run directory."""

    name: str
    path: str = Field(description="absolute directory")
    kind: Literal["disk", "tmpfs"] = "disk"
    read_only: bool = False
    bytes: int = Field(0, ge=0, description="size it may grow to; 0 = not bounded")
    shared: bool = Field(False, description="one directory per node, shared by several processes")
    node: bool = Field(
        False,
        description="the node's own directory, which outlives the process (a cluster mounts it into several pods)",
    )
    host_path: str = Field("", description="where the node has it, when not at `path`")


class StorageUse(Config):
    """One account as the graph sees it."""

    role: Literal["weights", "kv"]
    url: str
    container: str
    embedded: bool = False


class Link(Config):
    source: str
    to: str
    kind: Literal["requests", "decisions", "kv", "weights"]


class Process(Config):
    """One process (local) or container (cluster)."""

    name: str = Field(description="unique, e.g. prefill-0")
    component: Literal[
        "azurite",
        "weights",
        "router",
        "prefill",
        "decode",
        "aggregated",
        "dynamo-frontend",
        "frontend",
        "etcd",
        "nats",
        "events",
        "sweeper",
    ]
    replica: int = Field(0, ge=0)
    argv: tuple[str, ...] = Field(description="exact command line; runnable by hand with `env`")
    env: dict[str, str] = Field(
        default_factory=dict,
        description="every variable we set; the rest of the launcher's environment is not passed but PATH, HOME, LANG, TZ",
    )
    cwd: str = Field(
        "", description="working directory; inside the run directory, which also marks the process as ours"
    )
    config: dict[str, Any] | None = Field(
        None, description="content of the file that argv's --plan names; None = the process takes none"
    )
    config_path: str = ""
    ports: tuple[Port, ...] = ()
    sockets: tuple[str, ...] = Field((), description="Unix sockets it creates")
    after: tuple[str, ...] = Field((), description="names of processes that must be ready before it starts")
    probe: Probe | None = None
    identity: Literal["none", "issuer", "publisher", "serving", "serving-weights-only"] = "none"
    talks_to: tuple[str, ...] = Field((), description="components it opens connections to (network policies, sockets)")
    volumes: tuple[Volume, ...] = ()
    secrets: tuple[str, ...] = Field((), description="credential files it reads, absolute paths")
    gpus: int = Field(0, ge=0)
    cpus: float = Field(0.0, ge=0, description="CPU request; 0 = not stated")
    memory_bytes: int = Field(0, ge=0, description="expected resident memory, bytes; 0 = not stated")
    shm_bytes: int = Field(0, ge=0, description="shared memory it needs, bytes")
    drain_s: float = Field(
        30.0,
        ge=0,
        description="seconds the process may take to finish answers on SIGTERM; the launcher kills its group at grace_s",
    )
    grace_s: float = Field(60.0, gt=0, description="seconds between SIGTERM and SIGKILL in a cluster; exceeds drain_s")
    restarts: int = Field(3, ge=0, description="restarts within `restart_window_s` before it has failed")
    restart_window_s: float = Field(120.0, gt=0)
    frozen_s: float = Field(
        30.0, ge=0, description="seconds without any answer after which a process that was ready is killed; 0 = never"
    )
    inotify: int = Field(
        0, ge=0, description="inotify instances it takes (18 per Dynamo frontend, 17 per KvRouter process)"
    )


class Plan(Config):
    format: str = "dynamo-blob.plan/1"
    graph: str = Field(description="name of the graph")
    source: str = Field(description="path of the graph file")
    run_dir: str
    served_model: str
    release: dict[str, Any] = Field(
        description="model, version, manifest digest, weights digest as resolved; digests empty before publishing"
    )
    endpoint: str = Field(description="URL of the OpenAI API")
    processes: tuple[Process, ...] = Field(description="in start order")
    namespace: str = Field("", description="Dynamo namespace")
    engine_kind: Literal["vllm", "mock"] = "vllm"
    links: tuple[Link, ...] = ()
    storage: tuple[StorageUse, ...] = ()
    dirs: tuple[str, ...] = Field((), description="directories made before the start, absolute")
    shm_dir: str = Field("", description="directory on tmpfs that belongs to this run; removed at its end")
    cluster: dict[str, Any] | None = Field(None, description="ClusterSpec of the graph; only renderers read it")
    discovery: str = "file"
    event_plane: str = "zmq"
