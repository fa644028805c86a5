"""Ports, environment, time limits and memory: what the node must give."""

from __future__ import annotations

import re
from collections.abc import Iterator

from graphs.check.base import Context, kib
from graphs.check.storage import loopback
from graphs.load import Finding
from graphs.plan import Process
from graphs.site import LOCAL_REPLICAS
from graphs.spec import ComponentSpec

_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_IMAGE = re.compile(r"@sha256:[0-9a-f]{64}$")
_OWNED_PREFIX = ("DYN_", "VLLM_NIXL_", "DYNAMO_BLOB_", "ETCD_", "NATS_", "AZURE_STORAGE_", "AZURITE_")
_OWNED = (
    "CUDA_VISIBLE_DEVICES",
    "VLLM_HOST_IP",
    "VLLM_CPU_KVCACHE_SPACE",
    "HF_HUB_OFFLINE",
    "PATH",
    "HOME",
    "UCX_NET_DEVICES",
    "LD_PRELOAD",
)


def components(c: Context) -> Iterator[tuple[str, ComponentSpec]]:
    for name in type(c.spec.components).model_fields:
        own = getattr(c.spec.components, name)
        if own is not None:
            yield name, own


def environment(c: Context) -> Iterator[Finding]:
    for name, own in components(c):
        for key in own.env:
            where = c.graph.place("components", name, "env", key)
            if not _ENV_NAME.match(key):
                yield Finding(
                    "CHECK-ENV-NAME",
                    f"'{key}' is no name of an environment variable",
                    where,
                    f"component {name}: letters, digits and underscores only; a cluster keeps such a pod pending without an error (grove #228)",
                    "correct the name",
                )
            elif key in _OWNED or key.startswith(_OWNED_PREFIX):
                yield Finding(
                    "CHECK-ENV-OWNED",
                    f"{key} belongs to the plan",
                    where,
                    f"component {name}: set behind the plan's back it would disagree with what other components were told",
                    "use the graph's own setting",
                    "warning" if c.spec.engine.allow_unverified else "error",
                )


def ports(c: Context) -> Iterator[Finding]:
    seen: dict[int, str] = {}
    for p in c.plan.processes if not c.for_cluster else ():
        for port in p.ports:
            if port.number > 65535 or port.number < 1:
                yield Finding(
                    "CHECK-PORT-RANGE",
                    f"{p.name} would listen on port {port.number}",
                    c.graph.place("network", "base_port"),
                    "there is no such port",
                    "lower network.base_port",
                )
            if port.number in seen:
                key = (
                    ("components", "frontend", "listen")
                    if "frontend" in (p.component, seen[port.number].rpartition("-")[0])
                    else ("network", "base_port")
                )
                yield Finding(
                    "CHECK-PORT-CLASH",
                    f"{seen[port.number]} and {p.name} share port {port.number}",
                    c.graph.place(*key),
                    "the second would run without it, or not start",
                    "move components.frontend.listen or network.base_port",
                )
            seen[port.number] = p.name


def exposure(c: Context) -> Iterator[Finding]:
    front, host = c.spec.components.frontend, c.spec.components.frontend.listen.rpartition(":")[0]
    if front.auth == "none" and not loopback(host.strip("[]")):
        yield Finding(
            "CHECK-AUTH-NONE",
            "auth: none beyond loopback",
            c.graph.place("components", "frontend", "auth"),
            f"anyone who reaches {front.listen} could use the model as no tenant",
            "set auth: keys with a tenants file, or listen on 127.0.0.1",
        )
    if not loopback(c.spec.network.host):
        yield Finding(
            "CHECK-NOT-LOOPBACK",
            f"components listen on {c.spec.network.host}",
            c.graph.place("network", "host"),
            "their ports have no authentication",
            "leave network.host out on one machine",
            "warning",
        )


def planes(c: Context) -> Iterator[Finding]:
    r = c.spec.runtime
    if r.discovery == "kubernetes" and c.spec.storage.embedded == "azurite":
        yield Finding(
            "CHECK-PLANE",
            "discovery: kubernetes",
            c.graph.place("runtime", "discovery"),
            "the renderer sets it for clusters; on one machine there is no API server",
            "leave it out",
        )
    if r.request_plane == "nats" and r.event_plane != "nats":
        yield Finding(
            "CHECK-PLANE",
            "requests over NATS, events over ZMQ",
            c.graph.place("runtime", "event_plane"),
            "a graph that needs NATS gains nothing from a second event transport that binds every interface",
            "set event_plane: nats",
            "warning",
        )


def drains(c: Context) -> Iterator[Finding]:
    for name, own in components(c):
        if own.grace_s and own.grace_s <= own.drain_s:
            yield Finding(
                "CHECK-DRAIN-GRACE",
                f"{name} is killed before its drain ends",
                c.graph.place("components", name, "grace_s"),
                f"drain_s {own.drain_s:g}, grace_s {own.grace_s:g}; answers in flight would be cut",
                "make grace_s exceed drain_s, or leave it out",
            )
        if c.spec.cluster is not None and c.spec.cluster.termination_grace_s <= own.drain_s:
            yield Finding(
                "CHECK-DRAIN-CLUSTER",
                f"pods of {name} are killed before their drain ends",
                c.graph.place("cluster", "termination_grace_s"),
                f"drain_s {own.drain_s:g}, termination_grace_s {c.spec.cluster.termination_grace_s:g}",
                "raise cluster.termination_grace_s",
            )


def replicas(c: Context) -> Iterator[Finding]:
    for name, own in components(c):
        most = LOCAL_REPLICAS.get(name.replace("_", "-"), 8)
        if not c.for_cluster and own.replicas > most:
            yield Finding(
                "CHECK-REPLICAS",
                f"{own.replicas} replicas of {name} on one machine",
                c.graph.place("components", name, "replicas"),
                f"the plan has ports for {most}",
                f"at most {most}",
            )
        if own.replicas == 0 and name in ("frontend", "dynamo_frontend"):
            yield Finding(
                "CHECK-POOL-EMPTY",
                f"{name} has no replica",
                c.graph.place("components", name, "replicas"),
                "nothing would answer",
                "give it one",
            )


def unused(c: Context) -> Iterator[Finding]:
    """What was written and will not be there."""
    router = c.spec.components.router
    if router is not None and router.replicas == 0:
        yield Finding(
            "CHECK-POOL-EMPTY",
            "router has no replica",
            c.graph.place("components", "router", "replicas"),
            "requests go without a hint, as if the graph had no router",
            "give it one, or leave `router` out",
            "warning",
        )
    for worker in c.workers:
        if worker.spec.gpus and c.spec.engine.kind == "mock":
            yield Finding(
                "CHECK-GPUS",
                f"{worker.role} of a fake engine is given {worker.spec.gpus} GPUs",
                c.graph.place("components", worker.role, "gpus"),
                "engine.kind: mock computes nothing; the GPUs would stand idle",
                "leave gpus out",
            )


def on_one_node(c: Context) -> list[Process]:
    """What one machine must hold at least: everything locally; in a cluster the largest worker beside a weight service."""
    every = list(c.plan.processes)
    if c.spec.runtime.discovery != "kubernetes":
        return every
    workers = [p for p in every if p.component in ("prefill", "decode", "aggregated")]
    largest = max(workers, key=lambda p: (p.gpus, p.memory_bytes), default=None)
    return [p for p in every if p.name == "weights-0"] + ([largest] if largest else [])


def memory(c: Context) -> Iterator[Finding]:
    """Cache + DRAM tier + engine against the node, and each limit against what the component needs."""
    node, here = c.spec.node, on_one_node(c)
    need = sum(p.memory_bytes for p in here)
    if node.memory and need > node.memory:
        parts = ", ".join(f"{p.name} {kib(p.memory_bytes)}" for p in sorted(here, key=lambda p: -p.memory_bytes)[:4])
        yield Finding(
            "CHECK-NODE-MEMORY",
            "the graph does not fit the node's memory",
            c.graph.place("node", "memory"),
            f"needs {kib(need)} ({parts}, …), the node has {kib(node.memory)}",
            "fewer replicas, smaller cache_bytes, dram_bytes or kv_cache_bytes",
        )
    gpus = sum(p.gpus for p in here)
    if node.gpus and gpus > node.gpus:
        yield Finding(
            "CHECK-NODE-GPUS",
            f"the graph needs {gpus} GPUs",
            c.graph.place("node", "gpus"),
            f"the node has {node.gpus}",
            "fewer replicas or a smaller tensor_parallel_size",
        )
    shm = sum(p.shm_bytes + sum(v.bytes for v in p.volumes if v.kind == "tmpfs" and not v.read_only) for p in here)
    if node.shm and shm > node.shm:
        yield Finding(
            "CHECK-NODE-SHM",
            "the graph does not fit the node's shared memory",
            c.graph.place("node", "shm"),
            f"needs {kib(shm)}, the node has {kib(node.shm)}",
            "smaller dram_bytes or cache_bytes",
        )
    for worker in c.workers:
        from_plan = next(p for p in c.plan.processes if p.component == worker.role) if worker.spec.replicas else None
        facts = worker.profile
        resident = facts.host_bytes + (
            facts.model.weights_bytes + worker.args.kv_cache_bytes if facts.platform == "cpu" else 0
        )
        if from_plan and worker.spec.memory and worker.spec.memory < resident:
            yield Finding(
                "CHECK-MEMORY-LIMIT",
                f"{worker.role}: memory limit below its need",
                c.graph.place("components", worker.role, "memory"),
                f"limit {kib(worker.spec.memory)}, weights + KV + engine {kib(resident)}; it would be killed while loading",
                "raise it, or leave it out",
            )
    cache = c.spec.components.weights.cache_bytes
    weights = c.workers[0].profile.model.weights_bytes if c.workers else 0
    if cache and weights and cache < weights and c.spec.engine.kind == "vllm":
        yield Finding(
            "CHECK-CACHE-BYTES",
            "the node cache holds no whole release",
            c.graph.place("components", "weights", "cache_bytes"),
            f"cache_bytes {kib(cache)}, weights {kib(weights)}: every start reads Blob again",
            f"{kib(weights)} or more, or 0",
            "warning",
        )


def cluster(c: Context) -> Iterator[Finding]:
    if c.spec.cluster is None:
        return
    for name, image in c.spec.cluster.images.items():
        if not _IMAGE.search(image):
            yield Finding(
                "CHECK-IMAGE-UNPINNED",
                f"the image of {name} is not pinned",
                c.graph.place("cluster", "images", name),
                f"{image}: what runs could change without a change here; admission refuses it",
                "name it by digest: registry/image@sha256:…",
            )
    if c.spec.storage.embedded == "azurite" and not (c.spec.storage.weights.url or c.spec.cluster.accounts.weights):
        yield Finding(
            "CHECK-CLUSTER-STORAGE",
            "a cluster without accounts",
            c.graph.place("storage"),
            "the embedded store exists on one machine only",
            "set storage.weights.url and storage.kv.url, or cluster.accounts",
        )


RULES = (environment, ports, exposure, planes, drains, replicas, unused, memory, cluster)
