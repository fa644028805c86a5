"""Environment variables of every process: all that we set, and why. Nothing reaches a process that is not here,
in the graph's `env`, or among PATH, HOME, LANG and TZ."""

from __future__ import annotations

from collections.abc import Mapping

from components.common.engine.config import EngineArgs
from graphs.site import LOOPBACK, Site
from graphs.spec import GraphSpec

PASSED = ("PATH", "HOME", "LANG", "TZ")
RUN_MARK = "DYNAMO_BLOB_RUN"


class Environment:
    """The variables of one graph on one site."""

    def __init__(self, spec: GraphSpec, site: Site) -> None:
        self.spec, self.site = spec, site

    def python(self) -> dict[str, str]:
        """Every Python process."""
        return {
            RUN_MARK: str(self.site.run),  # how the next start recognises what a killed launcher left behind
            "PYTHONUNBUFFERED": "1",  # log lines appear when they are written
            "PYTHONSAFEPATH": "1",  # the working directory is no import root
        }

    def dynamo(self) -> dict[str, str]:
        """Every process with a Dynamo runtime."""
        runtime, host = self.spec.runtime, self.site.host(self.spec)
        discovery = self.site.discovery(self.spec)
        out = {
            **self.python(),
            "DYN_DISCOVERY_BACKEND": discovery,  # unset means etcd
            "DYN_REQUEST_PLANE": runtime.request_plane,
            "DYN_EVENT_PLANE": runtime.event_plane,
            "DYN_SYSTEM_HOST": host,  # defaults of these four are 0.0.0.0 or the host's address
            "DYN_TCP_RPC_HOST": host,
            "DYN_TCP_RESPONSE_STREAM_HOST": host,
            "DYN_EVENT_PLANE_HOST": host,
            "DYN_LOG": runtime.log,
            "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
            "DYN_SKIP_SGLANG_LOG_FORMATTING": "1",  # else every process leaves a file in the temporary directory
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",  # 5 s by default; our drain waits for answers itself
        }
        if discovery == "file":
            out["DYN_FILE_KV"] = str(self.site.run / "discovery")  # fresh per run: stale entries name dead workers
        if discovery == "etcd":
            out["ETCD_ENDPOINTS"] = runtime.etcd_url or f"http://{LOOPBACK}:{self.site.port(self.spec, 'etcd')}"
        broker = self.site.event_broker(self.spec)
        if broker:
            out["DYN_ZMQ_BROKER_URL"] = f"xsub={broker[0]} , xpub={broker[1]}"
        if "nats" in (runtime.event_plane, runtime.request_plane):
            out["NATS_SERVER"] = self.nats()
        return out

    def nats(self) -> str:
        return self.spec.runtime.nats_url or f"nats://{LOOPBACK}:{self.site.port(self.spec, 'nats')}"

    def announce(self) -> str:
        """Where promotions and purges are announced: the NATS of the graph's events; empty = it has none."""
        return self.nats() if self.spec.runtime.event_plane == "nats" else ""

    def worker(self, platform: str, args: EngineArgs, nixl_port: int, gpus: Mapping[str, str]) -> dict[str, str]:
        """vLLM, NIXL and UCX of one worker. `gpus`: how it is told which GPUs are its own."""
        host = self.site.host(self.spec)
        out = {
            "PYTHONHASHSEED": self.spec.runtime.hash_seed,  # block hashes are equal in every worker and after restarts
            "HF_HUB_OFFLINE": "1",  # no other origin is ever tried
            "OMP_NUM_THREADS": str(args.threads),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": host,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(nixl_port),
            "UCX_RCACHE_MAX_UNRELEASED": "1024",  # vLLM sets it too, but only when NIXL was not imported earlier
        }
        if own := self.site.engine_sockets():
            out["VLLM_RPC_BASE_PATH"] = own  # a killed engine leaves its sockets where the run's other ones are removed
        if host == LOOPBACK:
            out["UCX_NET_DEVICES"] = "lo"
        if platform == "cpu":
            # never VLLM_CPU_KVCACHE_SPACE: it is in whole GiB and overrides kv_cache_bytes in silence
            out["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            if self.spec.engine.kind == "vllm" and (library := self.site.preload()):
                out["LD_PRELOAD"] = library
        else:
            # Without these two a CUDA host moves 0.4-0.7 GB/s between processes, slower than recomputing.
            out["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
            out["UCX_RMA_PPLN_ENABLE"] = "y"
        return {**out, **gpus}
