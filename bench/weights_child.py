"""One measured load of weights per fork: a process that imported everything forks for each sample.

    python -m bench.weights_child          one JSON line {"variant", "config"} in, one JSON line of figures out

The clock runs from the first request for a weight to the last tensor copied into preallocated parameters, as vLLM's
loaders do. CPU is the child's own; peak memory is VmHWM after a reset, parameters included.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from components.common.loading.config import WeightsConfig
from components.common.loading.plan import weight_files
from components.common.loading.report import Report
from components.common.loading.resolve import resolve
from components.common.loading.session import Session
from components.common.loading.tensors import _TORCH

NIXL_PIECE = 8 * 2**20


def main() -> int:
    import torch  # noqa: F401 - for the forks; nothing here may use its threads, they do not survive a fork

    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                result = measured(
                    order["variant"], WeightsConfig.model_validate(order["config"]), order["threads"], order["timeline"]
                )
                print(json.dumps(result), flush=True)
                code = 0
            except BaseException as e:
                print(json.dumps({"error": f"{type(e).__name__}: {e}"}), flush=True)
            finally:
                os._exit(code)
        os.waitpid(pid, 0)
    return 0


def measured(variant: str, config: WeightsConfig, threads: int = 1, timeline: bool = False) -> dict[str, Any]:
    """{seconds, cpu_s_per_gb, peak_mib, gb_per_s, thread_s, timeline} of one load, with so many threads of torch."""
    import torch

    torch.set_num_threads(threads)
    report = Report(timeline=[] if timeline else None)
    Path("/proc/self/clear_refs").write_text("5")
    found = resolve(config, Report())
    files = weight_files(found.manifest)
    nbytes = sum(f.size for f in files)
    ceilings = {
        "ceiling_recv": _receive, "ceiling_verified_recv": _receive, "ceiling_memcpy": _memcpy, "ceiling_verified_memcpy": _receive,
        "sdk1": _sdk, "sdk8": _sdk, "runai": _runai,
    }  # fmt: skip
    buffer = _touched(nbytes) if variant.startswith("ceiling") else None
    parameters: Any = None
    if "verified" in variant:
        parameters = _touched(nbytes)
    else:
        parameters = {
            t.name: torch.empty(t.shape, dtype=getattr(torch, _TORCH[t.dtype])).fill_(0) for t in found.manifest.tensors
        }
    cpu, began = time.process_time(), time.perf_counter()
    if variant in ceilings:
        ceilings[variant](variant, config, found, files, parameters, buffer)
    else:
        for name, tensor in Session(config, found, report, verify=not variant.endswith("_noverify")).tensors():
            parameters[name].copy_(tensor)
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    peak = next(int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return {
        "seconds": seconds,
        "cpu_s_per_gb": used / nbytes * 1e9,
        "peak_mib": peak / 1024,
        "gb_per_s": nbytes / seconds / 1e9,
        "thread_s": report.thread_s,
        "timeline": report.timeline,
    }


def _touched(nbytes: int) -> Any:
    import numpy as np

    buffer = np.zeros(nbytes, dtype=np.uint8)
    buffer[::4096] = 1  # every page is there before the clock starts
    return buffer


def _receive(variant: str, config: Any, found: Any, files: Any, parameters: Any, buffer: Any) -> None:
    """Only recv_into of the same ranges over as many connections as blob_cold may use; no digest, no tensors.

    "verified": what no verified load can do without: the digest of what arrived (or lies there) and the copy into
    parameters, by as many threads, all of it in memory that is there already.
    """
    from blake3 import blake3

    jobs, at = [], 0
    verified, receive = "verified" in variant, variant.endswith("recv")
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
            view, hasher = buffer[where : where + count], blake3()
            if receive:
                on_bytes = hasher.update if verified else None
                found.reader.read_into(config.release.container, blob, begin, view.data, on_bytes=on_bytes)
            else:
                hasher.update(view.data)
            if verified:
                hasher.digest()
                parameters[where : where + count] = view

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


def _runai(variant: str, config: Any, found: Any, files: Any, parameters: Any, _: Any) -> None:
    """vLLM's runai_streamer: its iterator over the files in Blob; nothing is verified."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([f"az://{config.release.container}/{f.blob}" for f in files])
        for name, tensor in streamer.get_tensors():
            parameters[name].copy_(tensor)


if __name__ == "__main__":
    raise SystemExit(main())
