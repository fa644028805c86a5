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
    deadline_s: float = Field(180.0, gt=0, description="seconds from start to ready before the start has failed")


class Process(Config):
    """One process (local) or container (cluster)."""

    name: str = Field(description="unique, e.g. prefill-0")
    component: Literal["azurite", "weights", "router", "prefill", "decode", "aggregated", "dynamo-frontend", "frontend", "etcd", "nats"]
    replica: int = Field(0, ge=0)
    argv: tuple[str, ...] = Field(description="exact command line; runnable by hand with `env`")
    env: dict[str, str] = Field(default_factory=dict, description="every variable we set; the rest of the launcher's environment is not passed but PATH, HOME, LANG, TZ")
    config: dict[str, Any] | None = Field(None, description="content of the file that argv's --plan names; None = the process takes none")
    config_path: str = ""
    ports: tuple[Port, ...] = ()
    sockets: tuple[str, ...] = Field((), description="Unix sockets it creates")
    after: tuple[str, ...] = Field((), description="names of processes that must be ready before it starts")
    probe: Probe | None = None
    identity: Literal["none", "issuer", "publisher", "serving", "serving-weights-only"] = "none"
    gpus: int = Field(0, ge=0)
    memory_bytes: int = Field(0, ge=0, description="expected resident memory, bytes; 0 = not stated")
    shm_bytes: int = Field(0, ge=0, description="shared memory it needs, bytes")
    drain_s: float = Field(30.0, ge=0, description="seconds between SIGTERM and SIGKILL")
    restarts: int = Field(3, ge=0, description="restarts within `restart_window_s` before the graph has failed")
    restart_window_s: float = Field(120.0, gt=0)
    inotify: int = Field(0, ge=0, description="inotify instances it takes (18 per Dynamo frontend, 17 per KvRouter process)")


class Plan(Config):
    format: str = "dynamo-blob.plan/1"
    graph: str = Field(description="name of the graph")
    source: str = Field(description="path of the graph file")
    run_dir: str
    served_model: str
    release: dict[str, Any] = Field(description="model, version, manifest digest, weights digest as resolved; digests empty before publishing")
    endpoint: str = Field(description="URL of the OpenAI API")
    processes: tuple[Process, ...] = Field(description="in start order")
    discovery: str = "file"
    event_plane: str = "zmq"
