"""Weights into an engine's parameters: ours against SDK downloads, with and without node cache and peers.

Variants (see docs/weights.md): sdk1, sdk8 (SDK download to disk, then safetensors' own loader), blob_cold,
blob_cold_noverify, service_cold, node_cache, peer; ceilings ceiling_recv, ceiling_memcpy, ceiling_nixl.
Every variant copies each tensor into preallocated parameters, as vLLM's loaders do.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ROUNDS = 5


def bench(report: Any, quick: bool) -> None:
    """`quick`: one generated model of 8 shards, 0.5 GB, on the stand-in; full: 4 GB too. Rounds interleave the variants."""
    from tests.faults.releases import make_release

    report.server = "stand-in"
    report.note("runai: not run here, it needs https and a CA in the system bundle; modelexpress: pins protobuf < 7")
    work = Path(tempfile.mkdtemp(prefix="dynamo-blob-bench-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        for gigabytes in (0.5,) if quick else (0.5, 4.0):
            cell = f"{gigabytes:g}GB-8-shards"
            source, store = work / "model", work / "store"
            generate(source, int(gigabytes * 1e9), 8)
            manifest = make_release(store, source, model="bench")
            shutil.rmtree(source)
            _cell(report, cell, work, store, manifest)
            shutil.rmtree(store)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _cell(report: Any, cell: str, work: Path, store: Path, manifest: Any) -> None:
    from tests.faults.releases import weights_config
    from tests.faults.services import ServiceProcess

    with stand_in(store) as url:
        config = weights_config(url, work / "w", manifest, deadline_s=600.0)
        cold, warm, near = (str(work / name) for name in ("cold", "warm", "near"))
        size = sum(f.size for f in manifest.files) + 64 * 2**20
        names = [f"unix:{work}/s/{n}.sock" for n in ("warm", "near")] if find_spec("nixl") else []
        with ServiceProcess(work / "s", config, "warm", cache_dir=warm, cache_bytes=size, peers=tuple(names)).start(
            120
        ) as service:
            _child("load", config.model_copy(update={"service": service.socket}))  # fills it once
            variants = [
                "ceiling_recv",
                "ceiling_memcpy",
                "blob_cold",
                "blob_cold_noverify",
                "sdk1",
                "sdk8",
                "node_cache",
                "service_cold",
                *(["peer"] if names else []),
            ]
            if not names:
                report.note("peer: not run, NIXL is not installed here")
            for round_ in range(_ROUNDS):
                for variant in variants[round_ % len(variants) :] + variants[: round_ % len(variants)]:
                    before = served(url)
                    if variant in ("service_cold", "peer"):
                        directory = cold if variant == "service_cold" else near
                        peers = tuple(names) if variant == "peer" else ()
                        with ServiceProcess(
                            work / "s", config, "near", cache_dir=directory, cache_bytes=size, peers=peers
                        ).start(120) as other:
                            result = _child("load", config.model_copy(update={"service": other.socket}))
                        shutil.rmtree(directory)
                    else:
                        used = (
                            config.model_copy(update={"service": service.socket}) if variant == "node_cache" else config
                        )
                        result = _child(
                            {"node_cache": "load", "blob_cold": "load", "blob_cold_noverify": "noverify"}.get(
                                variant, variant
                            ),
                            used,
                        )
                    result["bytes_from_blob"] = served(url) - before
                    for key, unit in (
                        ("seconds", "s"),
                        ("cpu_s_per_gb", "s/GB"),
                        ("peak_mib", "MiB"),
                        ("gb_per_s", "GB/s"),
                        ("bytes_from_blob", "bytes"),
                    ):
                        report.add(f"{cell} {key}", variant, round_, result[key], unit)


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
def stand_in(root: Path) -> Iterator[str]:
    """The stand-in as a process of its own; yields its account URL."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "bench.standin", str(port), str(root)])
    try:
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            if time.monotonic() > end:
                raise TimeoutError("the stand-in does not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/standin"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def served(url: str) -> int:
    """Body bytes of objects that left the stand-in, by its own count."""
    import urllib.request

    with urllib.request.urlopen(url.rsplit("/", 1)[0] + "/__served__", timeout=10) as answer:
        return int(sum(n for name, n in json.loads(answer.read()).items() if "/objects/" in name))


def _child(variant: str, config: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.weights", variant, config.model_dump_json()],
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode:
        raise RuntimeError(f"{variant}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """One measured load in a process of its own: clock from the first request to the last tensor in the parameters."""
    import torch

    from components.common.loading.config import WeightsConfig
    from components.common.loading.plan import weight_files
    from components.common.loading.report import Report
    from components.common.loading.resolve import resolve
    from components.common.loading.session import Session
    from components.common.loading.tensors import _TORCH

    variant, config = sys.argv[1], WeightsConfig.model_validate_json(sys.argv[2])
    torch.set_num_threads(1)
    found = resolve(config, Report())
    parameters = {
        t.name: torch.empty(t.shape, dtype=getattr(torch, _TORCH[t.dtype])).fill_(0) for t in found.manifest.tensors
    }
    files = weight_files(found.manifest)
    nbytes = sum(f.size for f in files)
    run = {"ceiling_recv": _receive, "ceiling_memcpy": _memcpy, "sdk1": _sdk, "sdk8": _sdk}.get(variant)
    prepared = _prepare(variant, nbytes)
    cpu, began = time.process_time(), time.perf_counter()
    if run is not None:
        run(variant, config, found, files, parameters, prepared)
    else:
        for name, tensor in Session(config, found, Report(), verify=variant != "noverify").tensors():
            parameters[name].copy_(tensor)
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu_s_per_gb": used / nbytes * 1e9,
                "peak_mib": peak,
                "gb_per_s": nbytes / seconds / 1e9,
            }
        )
    )
    return 0


def _prepare(variant: str, nbytes: int) -> Any:
    import numpy as np

    if variant in ("ceiling_recv", "ceiling_memcpy"):
        buffer = np.zeros(nbytes, dtype=np.uint8)
        buffer[::4096] = 1  # every page is there before the clock starts
        return buffer
    return None


def _receive(variant: str, config: Any, found: Any, files: Any, parameters: Any, buffer: Any) -> None:
    """Only recv_into of the same ranges over as many connections as blob_cold may use; no digest, no tensors."""
    jobs, at = [], 0
    for f in files:
        for i in range(len(f.ranges)):
            begin, end = i * found.manifest.range_bytes, min(f.size, (i + 1) * found.manifest.range_bytes)
            jobs.append((f.blob, begin, at, end - begin))
            at += end - begin
    lock, left = threading.Lock(), iter(jobs)

    def work() -> None:
        while True:
            with lock:
                job = next(left, None)
            if job is None:
                return
            blob, begin, where, count = job
            found.reader.read_into(config.release.container, blob, begin, buffer[where : where + count].data)

    threads = [threading.Thread(target=work) for _ in range(config.range_in_flight)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def _memcpy(variant: str, config: Any, found: Any, files: Any, parameters: Any, buffer: Any) -> None:
    """Only the copy of every tensor into its parameter, from memory that is already there."""
    import torch

    whole, at = torch.from_numpy(buffer), 0
    for p in parameters.values():
        n = p.numel() * p.element_size()
        p.copy_(whole[at : at + n].view(p.dtype).view(p.shape))
        at += n


def _sdk(variant: str, config: Any, found: Any, files: Any, parameters: Any, _: Any) -> None:
    """azure-storage-blob to files on disk, then safetensors' loader: what a script without us does."""
    from safetensors import safe_open

    from components.common.storage.account import Account

    with tempfile.TemporaryDirectory() as directory:
        account = Account(config.account)
        paths = []
        for f in files:
            path = Path(directory) / f.path
            with path.open("wb") as out:
                account.blob(config.release.container, f.blob).download_blob(max_concurrency=int(variant[3:])).readinto(
                    out
                )
            paths.append(path)
        for path in paths:
            with safe_open(path, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    parameters[name].copy_(tensors.get_tensor(name))


if __name__ == "__main__":
    raise SystemExit(main())
