"""Import vLLM once per worker instead of three times (CPU platform).

vLLM runs each engine as three processes (API, EngineCore, Worker) and spawns the last two, so torch
and vLLM are imported three times: 87 % of a 29 s start on two cores. `prepare` imports them once in
the still single-threaded main process and forks a *zygote* from it, which serves as
multiprocessing's fork server: EngineCore and Worker become forks of the warm zygote.

It also answers kill -9: zygote and forks die with the process that made them (PR_SET_PDEATHSIG),
where spawned ones live on as orphans.

Not on GPUs: vLLM itself forbids forks after CUDA is initialised and its platform check initialises it.
DYNAMO_BLOB_ZYGOTE=off keeps vLLM's own way (spawn) on CPUs too: the baseline of `bench ready`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Mapping
from multiprocessing import connection, forkserver, spawn
from typing import Any

_PR_SET_PDEATHSIG = 1
SPIN_S = 0.001
SWITCH = "DYNAMO_BLOB_ZYGOTE"
_PRELOAD = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.v1.kv_offload.tiering.spec",
    "components.common.loading.plugin",
)


def wanted() -> bool:
    """False when the environment asks for vLLM's own way of starting its processes."""
    return os.environ.get(SWITCH, "").lower() not in ("off", "0", "no", "false")


def preload_openmp() -> None:
    """Re-execute this process with torch's own libgomp preloaded, once.

    vLLM sets LD_PRELOAD so for the processes it spawns; forks inherit what is loaded instead. Without it
    two OpenMP runtimes meet and prefill was measured four times slower.
    """
    if not importlib.metadata.version("torch").endswith("+cpu") or "libgomp" in os.environ.get("LD_PRELOAD", ""):
        return
    spec = importlib.util.find_spec("torch")
    libraries = os.path.join(os.path.dirname(spec.origin), "lib") if spec and spec.origin else ""
    found = [n for n in (os.listdir(libraries) if os.path.isdir(libraries) else []) if n.startswith("libgomp")]
    if found:
        before = os.environ.get("LD_PRELOAD")
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [before, os.path.join(libraries, found[0])]))
        os.execv(sys.executable, sys.orig_argv)


def prepare() -> bool:
    """Warm this process and start the zygote. Returns False where vLLM's own way is kept (not a CPU platform)."""
    import importlib

    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    for name in _PRELOAD:
        importlib.import_module(name)
    _carry_environment()
    _spin_less()
    _start()
    import vllm.envs

    # vLLM's CPU platform writes "spawn" into its environment; this is where that variable is read.
    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "forkserver"
    return True


def _spin_less() -> None:
    """EngineCore and Worker wait for each other by spinning for a second before they sleep: one core of two burnt
    per engine while the other process computes. A millisecond covers the gap between two steps."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (SPIN_S,)


def _start() -> None:
    """Fork the zygote and make it this process's fork server."""
    server: Any = forkserver._forkserver
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive_r, alive_w = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(alive_w)
            _serve(listener.detach(), alive_r, parent)
        os.close(alive_r)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_w, pid


def _serve(listener_fd: int, alive_r: int, parent: int) -> None:
    """The zygote's life; never returns."""
    import vllm.envs

    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "forkserver"
    _die_with_parent(parent)
    os.register_at_fork(after_in_child=_die_with_parent)
    # EngineCore forks its Worker from this same zygote instead of starting a server of its own.
    setattr(forkserver._forkserver, "ensure_running", lambda: None)  # noqa: B010
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        forkserver.main(listener_fd, alive_r, [])
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


def _die_with_parent(parent: int = 0) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:  # it died before the call above
        os._exit(1)


def _carry_environment() -> None:
    """Forks take their environment from the zygote; what vLLM set since must reach them as it does with spawn."""
    describe, prepare_child = spawn.get_preparation_data, spawn.prepare

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**describe(name), "environ": dict(os.environ)}

    def prepare(data: Mapping[str, Any]) -> None:
        environ = data.get("environ")
        if environ is not None:
            for key in set(os.environ) - set(environ):
                del os.environ[key]
            os.environ.update(environ)
        prepare_child(data)

    spawn.get_preparation_data, spawn.prepare = get_preparation_data, prepare
