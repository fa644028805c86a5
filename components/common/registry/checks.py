"""The named checks that stand between a published release and its approval.

Each gives one `Check`; the approver signs them all. A release passes when every result is *pass*, or
*allowed* where the approver allowed an exception by name.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.registry.headers import tensor_index
from components.common.registry.layout import Layout
from components.common.registry.manifest import FileEntry, Manifest
from components.common.registry.progress import Report
from components.common.registry.verify import ProvenReader, verify_content
from components.common.storage.account import Account

PICKLES = {
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".pickle",
    ".joblib",
    ".dill",
    ".npz",
    ".npy",
    ".h5",
    ".keras",
    ".pyc",
}
CODE = {".py", ".pyc", ".pyd", ".so", ".sh", ".dll", ".dylib", ".exe", ".js", ".ipynb", ".whl"}
BINARY = {".safetensors", ".gguf", ".model", ".spm", ".png", ".jpg", ".jpeg", ".gif", ".pdf", ".webp", ".tiktoken"}
REMOTE_CODE = "remote-code"
SCAN_TIMEOUT_S = 3600.0
_READERS = 4  # memory: one range each


@dataclass(frozen=True)
class Check:
    """`result`: pass, fail or allowed."""

    name: str
    result: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.result in ("pass", "allowed")

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def run_checks(
    account: Account,
    layout: Layout,
    manifest: Manifest,
    *,
    allow: tuple[str, ...] = (),
    scanner: str = "",
    progress: Report | None = None,
) -> list[Check]:
    """All checks, in order; `scanner` is a command line that gets a directory with the files and passes by exiting 0."""
    steps: list[tuple[str, Callable[[], Check]]] = [
        ("content", lambda: _content(account, layout, manifest, progress)),
        ("safetensors", lambda: _safetensors(account, layout, manifest)),
        ("no-pickle", lambda: _no_pickle(account, layout, manifest)),
        ("no-remote-code", lambda: _no_remote_code(account, layout, manifest, REMOTE_CODE in allow)),
        ("provenance", lambda: _provenance(manifest)),
    ]
    if scanner:
        steps.append(("scanner", lambda: _scan(account, layout, manifest, scanner)))
    out: list[Check] = []
    for name, step in steps:
        try:
            out.append(step())
        except DynamoBlobError as e:
            if e.code.startswith("STORAGE-"):
                raise
            out.append(Check(name, "fail", f"{e.code}: {e.what}: {e.why}"[:500]))
    return out


def _content(account: Account, layout: Layout, manifest: Manifest, progress: Report | None) -> Check:
    result = verify_content(account, layout, manifest, progress=progress).raise_first()
    return Check("content", "pass", f"{result.files} files, {result.bytes} bytes compared")


def _safetensors(account: Account, layout: Layout, manifest: Manifest) -> Check:
    found = []
    files = [f for f in manifest.files if f.path.endswith(".safetensors")]
    for file in files:
        found += tensor_index(file.path, file.size, ProvenReader(account, layout, manifest, file).read)
    if sorted(found, key=lambda t: (t.file, t.begin, t.end, t.name)) != list(manifest.tensors):
        return Check("safetensors", "fail", "the manifest's tensor index is not that of the files")
    if not files:
        return Check("safetensors", "fail", "the release has no safetensors file")
    return Check("safetensors", "pass", f"{len(found)} tensors in {len(files)} files")


def _no_pickle(account: Account, layout: Layout, manifest: Manifest) -> Check:
    with ThreadPoolExecutor(_READERS, thread_name_prefix="check") as pool:  # of many small files each is a request
        for problem in pool.map(lambda f: _pickle_problem(account, layout, manifest, f), manifest.files):
            if problem:
                pool.shutdown(cancel_futures=True)
                return Check("no-pickle", "fail", problem)
    return Check("no-pickle", "pass", f"{len(manifest.files)} files")


def _pickle_problem(account: Account, layout: Layout, manifest: Manifest, file: FileEntry) -> str:
    suffix = PurePosixPath(file.path).suffix.lower()
    if suffix in PICKLES:
        return f"{file.path}: a kind of file that can hold pickled code"
    head = ProvenReader(account, layout, manifest, file).read(0, min(file.size, 64 * 2**10))
    if len(head) > 1 and head[0] == 0x80 and head[1] in (2, 3, 4, 5) and suffix not in (".safetensors",):
        return f"{file.path}: begins like a pickle"
    if head[:4] == b"PK\x03\x04" and _zip_has_pickle(account, layout, manifest, file):
        return f"{file.path}: an archive with pickles"
    if suffix not in BINARY and not _is_text(head, cut=file.size > len(head)):
        return f"{file.path}: binary of an unknown kind"
    return ""


def _zip_has_pickle(account: Account, layout: Layout, manifest: Manifest, file: FileEntry) -> bool:
    if file.size > 256 * 2**20:
        return True  # nothing legitimate of this size is a zip
    data = ProvenReader(account, layout, manifest, file).read(0, file.size)
    try:
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    except zipfile.BadZipFile:
        return True
    return any(PurePosixPath(n).suffix.lower() in PICKLES | CODE for n in names)


def _is_text(data: bytes, *, cut: bool) -> bool:
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        if not cut or e.start < len(data) - 4:
            return False
        text = data[: e.start].decode()
    return "\0" not in text


def _no_remote_code(account: Account, layout: Layout, manifest: Manifest, allowed: bool) -> Check:
    found = [f.path for f in manifest.files if PurePosixPath(f.path).suffix.lower() in CODE]
    for file in manifest.files:
        if PurePosixPath(file.path).name in (
            "config.json",
            "tokenizer_config.json",
            "processor_config.json",
            "preprocessor_config.json",
        ):
            text = ProvenReader(account, layout, manifest, file).read(0, min(file.size, 64 * 2**20))
            if _has_key(text, "auto_map"):
                found.append(f"{file.path} (auto_map)")
    if not found:
        return Check("no-remote-code", "pass", "no code in the release")
    names = ", ".join(found[:5])
    if not manifest.provenance.get("remote_code"):
        return Check(
            "no-remote-code", "fail", f"{names}: the release does not say that it brings code (provenance.remote_code)"
        )
    if not allowed:
        return Check("no-remote-code", "fail", f"{names}: the approver did not allow {REMOTE_CODE}")
    return Check("no-remote-code", "allowed", names)


def _has_key(text: bytes, key: str) -> bool:
    def walk(value: Any) -> bool:
        if isinstance(value, dict):
            return key in value or any(walk(v) for v in value.values())
        return isinstance(value, list) and any(walk(v) for v in value)

    try:
        return walk(json.loads(text))
    except (ValueError, RecursionError):
        return key.encode() in text


def _provenance(manifest: Manifest) -> Check:
    missing = [k for k in ("source", "license") if not str(manifest.provenance.get(k) or "").strip()]
    if missing:
        return Check("provenance", "fail", f"missing: {', '.join(missing)} (publish with --provenance FILE)")
    return Check("provenance", "pass", f"{manifest.provenance['source']}, {manifest.provenance['license']}")


def _scan(account: Account, layout: Layout, manifest: Manifest, command: str) -> Check:
    with tempfile.TemporaryDirectory(prefix="dynamo-blob-scan-") as scratch:
        for file in manifest.files:
            path = Path(scratch) / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            reader = ProvenReader(account, layout, manifest, file)
            with path.open("wb") as f:
                for at in range(0, file.size, manifest.range_bytes):
                    f.write(reader.read(at, manifest.range_bytes))
        try:
            done = subprocess.run(
                [*shlex.split(command), scratch], capture_output=True, text=True, timeout=SCAN_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            return Check("scanner", "fail", f"{command}: {type(e).__name__}")
    tail = (done.stdout + done.stderr).strip().splitlines()[-1:] or [""]
    return Check(
        "scanner",
        "pass" if done.returncode == 0 else "fail",
        f"{command}: exit {done.returncode} {tail[0][:200]}".strip(),
    )
