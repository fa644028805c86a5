"""`dynamo release verify`: bytes per second of the sample and of a generated 4 GB model, beside what the store can give.

Each sample is a fresh process (its memory is what it says): *verify* compares every byte with the
manifest, *read* fetches the same ranges with the same reader and threads and hashes nothing: the
ceiling. Azurite is slow, so a stand-in shows what our side can do; the 4 GB model goes through Azurite
only without --quick.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from blake3 import blake3

from bench.report import Report
from bench.standin import StandIn
from components.common.registry.hashing import hash_file
from components.common.registry.layout import Layout
from components.common.registry.manifest import FileEntry, Manifest, weights_digest
from components.common.registry.publish import publish_directory, scan
from components.common.registry.verify import verify_content
from components.common.storage.account import Account
from components.common.storage.azurite import AzuriteConfig, ensure_key, wait_ready
from components.common.storage.config import AccountConfig, CredentialConfig
from components.common.storage.ranges import RangeReader

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / ".state/models/smollm2-135m-instruct"
PARALLEL = 4
LAYOUT = Layout("weights")


def bench(report: Report, quick: bool) -> None:
    from tools.sample_model import build

    build(SAMPLE)
    report.server = "azurite and stand-in, by row"
    rounds = 2 if quick else 5
    with tempfile.TemporaryDirectory(prefix="registry-verify-") as scratch:
        root = Path(scratch)
        big = generate(root / "big", 2 if quick else 4)
        with azurite(root / "azurite") as account, standin(root / "standin") as fast:
            cells = [("sample", "azurite", account, published(account, SAMPLE, "sample"))]
            if not quick:
                cells.append(("generated 4 GB", "azurite", account, published(account, big, "big")))
            cells.append(("sample", "stand-in", fast, laid_out(root / "standin", SAMPLE, "sample")))
            cells.append(
                (f"generated {2 if quick else 4} GB", "stand-in", fast, laid_out(root / "standin", big, "big"))
            )
            for round_ in range(rounds):
                for model, server, where, manifest in cells:
                    if server == "azurite" and model != "sample" and round_ >= 2:
                        continue  # minutes a round, and what it measures is Azurite
                    for variant in ("read", "verify") if round_ % 2 else ("verify", "read"):
                        result = measure(where, manifest, variant)
                        cell, size = f"{model}, {server}", sum(f.size for f in manifest.files)
                        report.add(cell, variant, round_, size / result["seconds"] / 1e6, "MB/s")
                        report.add(cell, f"{variant} CPU", round_, result["cpu"] / size * 1e9, "s/GB")
                        report.add(cell, f"{variant} memory", round_, result["grown"] / 1e6, "MB")
    report.ceiling("blake3, CPU time", hash_cpu(), "s/GB", "64 MiB in memory, median of 9")
    report.note(
        f"{PARALLEL} threads, 8 MiB ranges; memory = peak resident growth of the process from before the first range; "
        "CPU = of the client alone, which other load on the machine hardly changes"
    )


def hash_cpu() -> float:
    """CPU seconds per GB of blake3 over memory."""
    data, samples = os.urandom(64 * 2**20), []
    for _ in range(9):
        began = time.process_time()
        blake3(data).digest()
        samples.append((time.process_time() - began) / len(data) * 1e9)
    return median(samples)


def measure(account: Account, manifest: Manifest, variant: str) -> dict[str, float]:
    """One run in its own process: `seconds`, `cpu` seconds, `grown` bytes of peak resident memory above the start."""
    with tempfile.NamedTemporaryFile("wb", suffix=".json") as f:
        f.write(manifest.canonical())
        f.flush()
        argv = [sys.executable, "-m", "bench.registry_verify", account.config.model_dump_json(), f.name, variant]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    return dict(json.loads(done.stdout))


def child(config: str, manifest_file: str, variant: str) -> dict[str, Any]:
    account = Account(AccountConfig.model_validate_json(config))
    manifest = Manifest.model_validate_json(Path(manifest_file).read_bytes())
    before, began, cpu = peak_memory(), time.perf_counter(), time.process_time()
    if variant == "verify":
        verify_content(account, LAYOUT, manifest, parallel=PARALLEL).raise_first()
    else:
        read_only(account, manifest)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"seconds": seconds, "cpu": cpu, "grown": peak_memory() - before}


def peak_memory() -> int:
    """Bytes; not ru_maxrss, which a child inherits from its parent."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def read_only(account: Account, manifest: Manifest) -> None:
    reader, buffers, step = (
        RangeReader(account.config, account.credential, pool=PARALLEL),
        threading.local(),
        manifest.range_bytes,
    )

    def one(job: tuple[FileEntry, int]) -> None:
        file, index = job
        if not hasattr(buffers, "view"):
            buffers.view = memoryview(bytearray(step))
        reader.read_into(*LAYOUT.place(file), index * step, buffers.view[: min(step, file.size - index * step)])

    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(one, ((f, i) for f in manifest.files for i in range(len(f.ranges)))))
    reader.close()


def generate(directory: Path, gigabytes: int) -> Path:
    """A model of `gigabytes` files of 1 GB each, one tensor a file, random bytes."""
    directory.mkdir()
    size = 10**9
    for n in range(gigabytes):
        header = json.dumps({f"t{n}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        with (directory / f"model-{n}.safetensors").open("wb") as f:
            f.write(struct.pack("<Q", len(header)) + header)
            for _ in range(size // 10**8):
                f.write(os.urandom(10**7) * 10)
    return directory


def published(account: Account, directory: Path, name: str) -> Manifest:
    return publish_directory(account, LAYOUT.container, directory, name, "1").manifest


def laid_out(root: Path, directory: Path, name: str) -> Manifest:
    """The objects of `directory` as files of the stand-in (hard links), and their manifest."""
    (root / "weights" / "objects").mkdir(parents=True, exist_ok=True)
    files = []
    for path_name, path in scan(directory):
        d = hash_file(path)
        target = root / "weights" / LAYOUT.object(d.blake3)
        if not target.exists():
            target.write_bytes(path.read_bytes()) if path.stat().st_dev != root.stat().st_dev else os.link(path, target)
        files.append(
            FileEntry(
                path=path_name,
                size=d.size,
                blake3=d.blake3,
                sha256=d.sha256,
                blob=LAYOUT.object(d.blake3),
                ranges=d.ranges,
            )
        )
    return Manifest(
        model=name,
        version="1",
        files=tuple(files),
        tensors=(),
        weights_digest=weights_digest([f.blake3 for f in files]),
    )


@contextmanager
def azurite(root: Path) -> Iterator[Account]:
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    root.mkdir()
    ensure_key(root / "key")
    config = AzuriteConfig(data_dir=str(root / "data"), port=port, accounts={"bench": str(root / "key")})
    (root / "plan.json").write_text(config.model_dump_json())
    argv = [sys.executable, "-m", "components.common.storage.azurite", "--plan", str(root / "plan.json")]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_ready(config, 60, process)
        account = Account(
            AccountConfig(url=config.url("bench"), credential=CredentialConfig(kind="key_file", path=str(root / "key")))
        )
        for container in LAYOUT.containers:
            account.ensure_container(container)
        yield account
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def standin(root: Path) -> Iterator[Account]:
    """The stand-in runs in this process; what is measured runs in others."""
    root.mkdir()
    ensure_key(root / "key")
    server = StandIn(root).start()
    try:
        yield Account(
            AccountConfig(url=server.url, credential=CredentialConfig(kind="key_file", path=str(root / "key")))
        )
    finally:
        server.close()


if __name__ == "__main__":
    print(json.dumps(child(*sys.argv[1:4])))
