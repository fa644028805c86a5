"""Weights into an engine's parameters: ours against SDK downloads, with and without node cache and peers.

Variants (see docs/weights.md): sdk1, sdk8 (SDK download to disk, then safetensors' own loader), blob_cold,
blob_cold_noverify, service_cold, node_cache (sealed memory), node_cache_hashed (files on tmpfs), peer; ceilings ceiling_recv, ceiling_memcpy, ceiling_nixl,
and the same with what no verified load can do without, digest and copy: ceiling_verified_recv, ceiling_verified_memcpy.
Every variant copies each tensor into preallocated parameters, as vLLM's loaders do. Bytes from Blob are the server's
own count: the stand-in's, or Azurite's access log. CPU and peak memory are the loading process's; "services" are the
weight services it loads from, on the same node.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROUNDS = 5
LOADS = (
    "ceiling_recv", "ceiling_verified_recv", "ceiling_memcpy", "ceiling_verified_memcpy", "blob_cold", "blob_cold_noverify", "sdk1", "sdk8",
    "node_cache", "node_cache_hashed",
)  # fmt: skip
LINK = ("ceiling_recv", "blob_cold", "blob_cold_noverify", "sdk1")
"""Where the server is the limit."""
LINK_RATE = 150e6
SERVED = ("service_cold", "peer", "ceiling_nixl")
"""With processes of their own, started for each sample."""
UNITS = (
    ("seconds", "s"), ("cpu_s_per_gb", "s/GB"), ("services_cpu_s_per_gb", "s/GB"), ("peak_mib", "MiB"), ("services_peak_mib", "MiB"),
    ("gb_per_s", "GB/s"), ("bytes_from_blob", "bytes"),
)  # fmt: skip
SAMPLE = Path(__file__).resolve().parent.parent / ".state/models/smollm2-135m-instruct"


def bench(report: Any, quick: bool) -> None:
    """`quick`: the sample model on both servers and 0.5 GB of 8 shards on the stand-in; full: 4 GB instead. Rounds interleave."""
    from tests.faults.releases import make_release
    from tools.sample_model import build

    build(SAMPLE)
    report.server = "stand-in, azurite"
    report.note(f"torch copies into parameters with {engine_threads()} threads, in variants and ceilings alike")
    report.note(
        "runai: over https only, see `python -m bench.weights_cell --tls --only runai,blob_cold,sdk8`; modelexpress: not run here, it pins protobuf < 7"
    )
    work = Path(tempfile.mkdtemp(prefix="db-weights-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        gigabytes, few = (0.5, 3) if quick else (4.0, ROUNDS)
        source, store = work / "model", work / "store"
        manifest = make_release(store, SAMPLE, model="bench")
        with stand_in(store) as (url, served):
            cell(report, "sample, stand-in", work, url, served, manifest, served_rounds=few)
        with azurite(work, store) as (config, served):
            cell(report, "sample, azurite", work, config.url, served, manifest, account=config, served_rounds=few)
        shutil.rmtree(store)
        generate(source, int(gigabytes * 1e9), 8)
        manifest = make_release(store, source, model="bench")
        shutil.rmtree(source)
        with stand_in(store) as (url, served):
            cell(report, f"{gigabytes:g} GB of 8 shards, stand-in", work, url, served, manifest, served_rounds=few)
        with stand_in(store, LINK_RATE) as (url, served):
            name = f"{gigabytes:g} GB, link of {LINK_RATE / 1e6:.0f} MB/s"
            cell(report, name, work, url, served, manifest, only=LINK, rounds=3 if quick else ROUNDS)
        verdict(report)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def engine_threads() -> int:
    """Torch threads of vLLM's CPU worker as it chooses them by itself: all cores it may use but one (ours: engine.threads)."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


class Child:
    """The forking process that measures. `prefix`, `env`: what it is started under."""

    def __init__(self, prefix: tuple[str, ...] = (), env: Any = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "bench.weights_child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **dict(env)},
        )  # fmt: skip

    def load(self, variant: str, config: Any, threads: int, timeline: bool = False) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        order = {"variant": variant, "config": config.model_dump(mode="json"), "threads": threads, "timeline": timeline}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        result = dict(json.loads(self.process.stdout.readline()))
        if "error" in result:
            raise RuntimeError(f"{variant}: {result['error']}")
        return result

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def cell(
    report: Any, name: str, work: Path, url: str, served: Callable[[], int], manifest: Any, account: Any = None,
    only: tuple[str, ...] = (), rounds: int = ROUNDS, served_rounds: int = ROUNDS, threads: int = 0, trace: str = "", changes: Any = (),
) -> None:  # fmt: skip
    """`threads`: of torch, in variants and ceilings alike. `changes`: of the WeightsConfig. `trace`: a file for the last round."""
    from components.common.loading.plan import weight_files
    from tests.faults.releases import weights_config
    from tests.faults.services import ServiceProcess

    threads = threads or engine_threads()
    config = weights_config(url, work / "w", manifest, deadline_s=600.0, **dict(changes))
    if account is not None:
        config = config.model_copy(update={"account": account})
    nbytes = sum(f.size for f in manifest.files)
    size = 2 * nbytes + 64 * 2**20  # files on tmpfs and their sealed copies
    names = tuple(f"unix:{work}/s/{n}.sock" for n in ("warm", "near"))
    cache = lambda of: {"cache_dir": str(work / of), "cache_bytes": size}  # noqa: E731
    child, runai = Child(), _runai(work, config) if "runai" in only else None
    with ServiceProcess(work / "s", config, "warm", peers=names, **cache("warm")).start(120) as service:
        try:
            timelines = {}
            if not only or any(v.startswith(("node_cache", "peer")) for v in only):
                child.load("blob_cold", config.model_copy(update={"service": service.socket}), threads)  # fills it once
                _wait(lambda: service.status()["cache"]["sealed"] == len(weight_files(manifest)))
            for round_ in range(rounds):
                variants = [*only] or [*LOADS, *(SERVED if round_ < served_rounds else ())]
                turn = round_ % len(variants)
                for variant in variants[turn:] + variants[:turn]:
                    measurer = runai if variant == "runai" and runai else child
                    load = partial(
                        measurer.load, variant, threads=threads, timeline=bool(trace) and round_ == rounds - 1
                    )
                    before = served()
                    if variant == "ceiling_nixl":
                        result = _nixl(nbytes)
                    elif variant in SERVED:
                        peers = names if variant == "peer" else ()
                        with ServiceProcess(work / "s", config, "near", peers=peers, **cache("near")).start(
                            120
                        ) as other:
                            if peers:  # NIXL's import takes seconds; a peer that is long up is what is measured
                                _wait(lambda other=other: other.status()["peers"]["wire_ready"])  # type: ignore[misc]
                            spent_s = _cpu_s(service, other)
                            result = load(config.model_copy(update={"service": other.socket}))
                            spent_s = _cpu_s(service, other) - spent_s
                            result["services_peak_mib"] = _peak_mib(other)
                            spent = other.status()["load"]["thread_s"]
                            result["thread_s"] |= {f"service {what}": x for what, x in spent.items()}
                        _remove(work / "near")
                    else:
                        cached = variant.startswith("node_cache")
                        uid = {"sealed_uid": -2} if variant.endswith("_hashed") else {}
                        used = config.model_copy(update={"service": service.socket, **uid}) if cached else config
                        spent_s = _cpu_s(service)
                        result = load(used)
                        spent_s = _cpu_s(service) - spent_s
                    if variant in SERVED or variant.startswith("node_cache"):
                        result["services_cpu_s_per_gb"] = spent_s / nbytes * 1e9
                    result["bytes_from_blob"] = served() - before
                    for key, unit in UNITS:
                        if key in result:
                            report.add(f"{name}: {key}", variant, round_, result[key], unit)
                    for what, seconds in result.get("thread_s", {}).items():
                        report.add(f"{name}: thread seconds", f"{variant}, {what}", round_, seconds, "s")
                    if timeline := result.pop("timeline", None):
                        timelines[variant] = timeline
            if trace:
                from bench.weights_cell import events

                Path(trace).write_text(events(timelines))
        finally:
            child.close()
            if runai:
                runai.close()
    _remove(work / "warm")


def _runai(work: Path, config: Any) -> Child:
    """runai's library speaks https to <account>.<suffix> only and reads the CAs of one file, /etc/ssl/certs/ca-certificates.crt
    (SSL_CERT_FILE, SSL_CERT_DIR and CURL_CA_BUNDLE are ignored). So it sees that file with our CA behind it in a mount
    namespace of its own: the machine's is left alone. Needs root, `unshare`, and the package runai-model-streamer-azure."""
    import base64
    from urllib.parse import urlsplit

    system = "/etc/ssl/certs/ca-certificates.crt"
    bundle = work / "bundle.pem"
    bundle.write_bytes(Path(system).read_bytes() + Path(config.account.ca_bundle).read_bytes())
    account = {
        "AZURE_STORAGE_ACCOUNT_NAME": "standin",
        "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"the stand-in checks none").decode(),
        "AZURE_STORAGE_ENDPOINT_SUFFIX": f"localhost:{urlsplit(config.account.url).port}",
    }
    return Child(("unshare", "-m", "sh", "-c", f'mount --bind "{bundle}" {system} && exec "$@"', "sh"), account)


def _cpu_s(*services: Any) -> float:
    """CPU seconds of weight services until now, by /proc."""
    times = [psutil.Process(s.process.pid).cpu_times() for s in services]
    return sum(t.user + t.system for t in times)


def _peak_mib(service: Any) -> float:
    lines = Path(f"/proc/{service.process.pid}/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) / 1024


def _wait(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the weight service is not as far as the measurement needs it")
        time.sleep(0.1)


def _remove(path: Path) -> None:
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)
    shutil.rmtree(path, ignore_errors=True)


def _nixl(nbytes: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.nixl_rate", str(nbytes)], capture_output=True, text=True, timeout=300, check=True
    )
    seconds = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return {"seconds": seconds, "gb_per_s": nbytes / seconds / 1e9}


def verdict(report: Any) -> None:
    from statistics import median

    for name in sorted({r["cell"].partition(": ")[0] for r in report.rows}):
        found: dict[tuple[str, str], list[float]] = {}
        for r in report.rows:
            at, _, key = r["cell"].partition(": ")
            if at == name:
                found.setdefault((key, r["variant"]), []).append(r["value"])
        rate = {v: median(x) for (key, v), x in found.items() if key == "gb_per_s"}
        cpu = {v: median(x) for (key, v), x in found.items() if key == "cpu_s_per_gb"}
        blob = {v: max(x) for (key, v), x in found.items() if key == "bytes_from_blob"}

        def of(variant: str, ceiling: str, goal: str = "", rate: dict[str, float] = rate) -> str:
            if variant not in rate or ceiling not in rate:
                return ""
            return f"{variant} {rate[variant] / rate[ceiling]:.2f} of {ceiling}{f' (goal {goal})' if goal else ''}"

        said = [
            of("blob_cold", "ceiling_recv", "0.85 on the stand-in"), of("blob_cold", "ceiling_verified_recv"),
            f"verification costs {1 - rate['blob_cold'] / rate['blob_cold_noverify']:.0%} of the rate" if {"blob_cold", "blob_cold_noverify"} <= rate.keys() else "",
            of("node_cache", "ceiling_memcpy", "0.8"), of("node_cache_hashed", "ceiling_memcpy"), of("node_cache_hashed", "ceiling_verified_memcpy"),
            of("peer", "ceiling_nixl", "0.8"), *[f"{v}: {blob[v]:.0f} bytes from Blob" for v in ("node_cache", "peer") if v in blob],
            *[f"blob_cold {rate['blob_cold'] / rate[v]:.1f}x {v}" for v in ("sdk1", "sdk8") if v in rate],
            "CPU s/GB: " + ", ".join(f"{v} {c:.2f}" for v, c in cpu.items()),
        ]  # fmt: skip
        report.note(f"{name}: " + "; ".join(x for x in said if x))


def generate(directory: Path, nbytes: int, shards: int) -> None:
    """`shards` safetensors files of random bf16 tensors, 32 MiB each and a few small ones."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    block = torch.from_numpy(np.random.default_rng(1).integers(0, 255, 16 * 2**20, dtype=np.int16))
    for shard in range(shards):
        tensors, left = {}, nbytes // shards
        while left > 0:
            count = min(left // 2, len(block)) or 1
            tensors[f"s{shard}.t{len(tensors)}"] = (block[:count] + shard).view(torch.bfloat16)
            left -= 2 * count
        save_file(tensors, directory / f"model-{shard:05d}.safetensors")
    (directory / "config.json").write_text("{}")


@contextlib.contextmanager
def stand_in(
    root: Path, rate: float = 0.0, tls: tuple[Path, Path] | None = None
) -> Iterator[tuple[str, Callable[[], int]]]:
    """The stand-in as a process of its own; yields its account URL and how many body bytes of objects it has sent.

    `tls`: certificate (its own CA) and key."""
    import socket
    import ssl
    import urllib.request

    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.standin", str(port), str(root), str(rate), *map(str, tls or ())]
    )
    base = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    trusted = ssl.create_default_context(cafile=str(tls[0])) if tls else None
    try:
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            if time.monotonic() > end:
                raise TimeoutError("the stand-in does not start")
            time.sleep(0.05)

        def served() -> int:
            with urllib.request.urlopen(f"{base}/__served__", timeout=10, context=trusted) as answer:
                return int(sum(n for name, n in json.loads(answer.read()).items() if "/objects/" in name))

        yield f"{base}/standin", served
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


@contextlib.contextmanager
def azurite(work: Path, store: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """Azurite with the release of `store` uploaded; yields the account and the bytes of objects in its access log."""
    from components.common.storage import azurite as embedded
    from tests.kvtools.azure import Store

    server = Store(work / "azurite").start()
    try:
        account = server.account()
        account.container("weights").create_container()
        for path in sorted(p for p in (store / "weights").rglob("*") if p.is_file()):
            with path.open("rb") as f:
                account.blob("weights", path.relative_to(store / "weights").as_posix()).upload_blob(f)
        log = Path(server.config.access_log)
        yield server.account_config(), lambda: embedded.served(log, path_contains="/objects/")
    finally:
        server.kill()
        shutil.rmtree(work / "azurite", ignore_errors=True)
