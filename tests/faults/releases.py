"""Small releases on disk, for tests that need a store but not the registry."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from safetensors.torch import save_file

from components.common.loading.config import ReleaseConfig, TrustConfig, WeightsConfig
from components.common.registry import signing
from components.common.registry.hashing import hash_file
from components.common.registry.headers import tensor_index
from components.common.registry.manifest import FileEntry, Manifest, TensorEntry, weights_digest
from components.common.registry.publish import SIGNATURE_FORMAT
from components.common.storage.config import AccountConfig, CredentialConfig

MiB = 2**20


def make_release(
    store: Path,
    source: Path,
    model: str = "m",
    version: str = "1",
    *,
    range_bytes: int = 8 * MiB,
    container: str = "weights",
) -> Manifest:
    """Lay the model directory `source` out under `store` as an unsigned release; its manifest."""
    files, tensors = [], []
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        name = path.relative_to(source).as_posix()
        d = hash_file(path, range_bytes)
        blob = f"objects/{d.blake3}"
        target = store / container / blob
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.link(path, target) if os.stat(path).st_dev == os.stat(target.parent).st_dev else target.write_bytes(
                path.read_bytes()
            )
        files.append(FileEntry(path=name, size=d.size, blake3=d.blake3, sha256=d.sha256, blob=blob, ranges=d.ranges))
        if name.endswith(".safetensors"):
            with path.open("rb") as f:

                def read(offset: int, length: int, f: Any = f) -> bytes:
                    f.seek(offset)
                    return bytes(f.read(length))

                tensors += tensor_index(name, d.size, read)
    manifest = Manifest(
        model=model, version=version, range_bytes=range_bytes, files=tuple(files),
        tensors=tuple(sorted(tensors, key=lambda t: (t.file, t.begin))), weights_digest=weights_digest([f.blake3 for f in files]),
    )  # fmt: skip
    put_manifest(store, manifest, container)
    return manifest


def put_manifest(store: Path, manifest: Manifest, container: str = "weights") -> None:
    target = store / container / f"releases/{manifest.model}/{manifest.version}/manifest.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(manifest.canonical())
    commit = {
        "format": SIGNATURE_FORMAT,
        "model": manifest.model,
        "version": manifest.version,
        "manifest": manifest.digest(),
    }
    target.with_name("manifest.sig").write_bytes(signing.unsigned(commit))


def random_model(directory: Path, shards: list[dict[str, torch.Tensor]], config: dict[str, Any] | None = None) -> None:
    """A model directory: safetensors shards and the small files around them."""
    directory.mkdir(parents=True, exist_ok=True)
    for i, tensors in enumerate(shards):
        save_file(tensors, directory / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config or {"model_type": "none"}))
    (directory / "tokenizer.json").write_text(json.dumps({"vocab": {str(i): i for i in range(2000)}}))
    (directory / "chat_template.jinja").write_text("{{ messages }}")


def tensors_of(seed: int, sizes: list[int]) -> dict[str, torch.Tensor]:
    """Named uint8 tensors of `sizes` bytes with reproducible content."""
    rng = np.random.default_rng(seed)
    return {f"t{seed}.{i:03d}": torch.from_numpy(rng.integers(0, 256, n, dtype=np.uint8)) for i, n in enumerate(sizes)}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {k: blake3(bytes_of(t)).hexdigest() for k, t in tensors.items()}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def sas_file(directory: Path, life_s: float = 3600.0, signature: str = "x") -> Path:
    """A credential file that the stand-in accepts (it checks nothing)."""
    path = directory / "serving.sas"
    path.write_text(
        json.dumps(
            {
                "sas": f"sv=1&sig={signature}",
                "expires": time.time() + life_s,
                "issued": time.time(),
                "identity": "serving",
            }
        )
    )
    path.chmod(0o600)
    return path


def weights_config(url: str, work: Path, manifest: Manifest | None = None, **changes: Any) -> WeightsConfig:
    """Configuration of a loader that reads `manifest` from the store at `url`; timeouts short enough for tests."""
    work.mkdir(parents=True, exist_ok=True)
    release = {"model": manifest.model if manifest else "m", "version": manifest.version if manifest else "1"}
    base: dict[str, Any] = {
        "release": ReleaseConfig(**release, manifest_digest=manifest.digest() if manifest else ""),
        "account": AccountConfig(
            url=url, credential=CredentialConfig(kind="sas_file", path=str(sas_file(work))), connect_timeout_s=2.0, read_timeout_s=2.0
        ),
        "trust": TrustConfig(require="none"),
        "root": str(work / "root"),
        "report": str(work / "report.json"),
        "range_deadline_s": 10.0,
        "deadline_s": 60.0,
    }  # fmt: skip
    return WeightsConfig(**{**base, **changes})


__all__ = [
    "FileEntry",
    "MiB",
    "TensorEntry",
    "digests",
    "make_release",
    "random_model",
    "sas_file",
    "tensors_of",
    "weights_config",
]
