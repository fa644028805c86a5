"""Weights into HBM: verified ranges through pinned segments and a copy stream, against pageable copies.

Needs a CUDA device. Variants: gpu_streamed (what the loader does on a GPU), gpu_pageable (the same stream, plain
copies), gpu_noverify (gpu_streamed without digests: what verification costs); ceilings: ceiling_recv (the same
ranges into host memory, no digest), ceiling_h2d (pinned memory to HBM). After the timed rounds every parameter is
compared with the source, and the comparison is shown to fail on one flipped element.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import Report


def bench(report: Report, quick: bool) -> None:
    import torch
    from safetensors.torch import load_file

    from bench.weights import generate, stand_in
    from components.common.loading.plan import weight_files
    from components.common.loading.report import Report as LoadReport
    from components.common.loading.resolve import resolve
    from components.common.loading.tensors import _TORCH
    from tests.faults.releases import make_release, weights_config

    if not torch.cuda.is_available():
        raise SystemExit("weights-gpu needs a CUDA device")
    report.server = "stand-in"
    gigabytes = 2.0 if quick else 8.0
    work = Path(tempfile.mkdtemp(prefix="dynamo-blob-bench-", dir="/dev/shm"))
    try:
        generate(work / "model", int(gigabytes * 1e9), 8)
        manifest = make_release(work / "store", work / "model", model="bench")
        with stand_in(work / "store") as (url, _):
            config = weights_config(
                url, work / "w", manifest, deadline_s=600.0, range_in_flight=16, budget_bytes=2 * 2**30
            )
            found = resolve(config, LoadReport())
            nbytes = sum(f.size for f in weight_files(found.manifest))
            parameters = {
                t.name: torch.empty(t.shape, dtype=getattr(torch, _TORCH[t.dtype]), device="cuda")
                for t in manifest.tensors
            }
            cell = f"{gigabytes:g}GB-8-shards"
            variants = ["gpu_streamed", "gpu_pageable", "gpu_noverify", "ceiling_recv", "ceiling_h2d"]
            for round_ in range(3 if quick else 5):
                for variant in variants[round_ % 5 :] + variants[: round_ % 5]:
                    for p in parameters.values():
                        p.zero_()
                    torch.cuda.synchronize()
                    seconds, cpu = _timed(variant, config, found, parameters, nbytes)
                    report.add(f"{cell} seconds", variant, round_, seconds, "s")
                    report.add(f"{cell} rate", variant, round_, nbytes / seconds / 1e9, "GB/s")
                    report.add(f"{cell} client CPU", variant, round_, cpu / nbytes * 1e9, "s/GB")
            _timed("gpu_streamed", config, found, parameters, nbytes)
            wrong = _differing(parameters, work / "model", load_file)
            if wrong:
                raise SystemExit(f"parameters differ from the source: {wrong[:3]}")
            name = next(iter(parameters))
            parameters[name].view(torch.int16).view(-1)[7] ^= 1
            if _differing(parameters, work / "model", load_file) != [name]:
                raise SystemExit("the comparison does not see a flipped bit")
            report.note(f"{len(parameters)} parameters equal to the source after gpu_streamed; a flipped bit is seen")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _timed(variant: str, config: Any, found: Any, parameters: Any, nbytes: int) -> tuple[float, float]:
    import numpy as np
    import torch

    from bench.weights_child import _receive
    from components.common.loading.cuda import Cuda, pin, staged
    from components.common.loading.plan import weight_files
    from components.common.loading.report import Report as LoadReport
    from components.common.loading.session import Session

    buffer: Any = None
    if variant == "ceiling_recv":
        buffer = np.zeros(nbytes, dtype=np.uint8)
        buffer[::4096] = 1
    elif variant == "ceiling_h2d":
        buffer = torch.empty(256 * 2**20, dtype=torch.uint8, pin_memory=True)
    session = Session(config, found, LoadReport(), verify=variant != "gpu_noverify")
    cpu, began = time.process_time(), time.perf_counter()
    if variant == "ceiling_recv":
        _receive(variant, config, found, weight_files(found.manifest), parameters, buffer)
    elif variant == "ceiling_h2d":
        for p in parameters.values():
            p.view(torch.uint8).view(-1).copy_(buffer[: p.numel() * p.element_size()], non_blocking=True)
    elif variant == "gpu_pageable":
        for name, tensor in session.tensors():
            parameters[name].copy_(tensor)
    else:
        for name, tensor in staged(session.tensors(pin=pin), Cuda()):
            parameters[name].copy_(tensor)
    torch.cuda.synchronize()
    return time.perf_counter() - began, time.process_time() - cpu


def _differing(parameters: Any, directory: Path, load_file: Any) -> list[str]:
    import torch

    wrong = []
    for path in sorted(directory.glob("*.safetensors")):
        for name, tensor in load_file(str(path)).items():
            if not torch.equal(parameters[name].cpu().view(torch.int16), tensor.view(torch.int16)):
                wrong.append(name)
    return wrong
