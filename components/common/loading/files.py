"""The small files of a release (config, tokenizer, chat template, code, ...) as the engine's model directory.

`<root>/<weights digest>/` holds every file of the release that is not safetensors, plus `manifest.json`.
It appears in one rename, complete and verified; it is the same absolute path on every worker.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.loading.config import WeightsConfig
from components.common.loading.fetch import Fetcher, mismatch
from components.common.loading.plan import RangeJob, Segment, small_files
from components.common.loading.report import Report
from components.common.loading.resolve import Found, resolve
from components.common.registry.manifest import FileEntry, Manifest

_SMALL_LIMIT = 1 << 30


def materialise_small_files(config: WeightsConfig) -> Path:
    """Directory of the release's small files, made or verified now. Blocks up to service_deadline_s for the service.

    A failure is also written to the report file. Raises DynamoBlobError.
    """
    report = Report(config.report)
    try:
        return _materialise(config, resolve(config, report), report)
    except DynamoBlobError as e:
        report.fail(e)
        raise


def _materialise(config: WeightsConfig, resolved: Found, report: Report) -> Path:
    manifest = resolved.manifest
    target = Path(config.root) / manifest.weights_digest
    if verify_directory(target, resolved) is None:
        return target
    fetcher = Fetcher(
        resolved.reader, config.release.container, report, retries=config.range_retries, range_s=config.range_deadline_s,
        deadline=time.monotonic() + config.deadline_s,
    )  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        work.mkdir()
        write_small_files(work, manifest, fetcher)
        (work / "manifest.json").write_bytes(resolved.manifest_bytes)
        _publish(work, target, resolved)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def write_small_files(directory: Path, manifest: Manifest, fetcher: Fetcher) -> None:
    """Fetch every small file of the release into `directory`, verified."""
    for file in small_files(manifest):
        path = directory / safe_path(file.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fetch_file(file, manifest.range_bytes, fetcher))


def _publish(work: Path, target: Path, resolved: Found) -> None:
    """Rename into place; another worker may have done so meanwhile, or left an altered directory there."""
    for _ in range(3):
        try:
            os.rename(work, target)
            return
        except OSError:
            bad = verify_directory(target, resolved)
            if bad is None:
                return
            aside = target.with_name(f".{target.name}.bad.{secrets.token_hex(4)}")
            with contextlib.suppress(OSError):
                os.rename(target, aside)
            shutil.rmtree(aside, ignore_errors=True)
    raise DynamoBlobError(
        "WEIGHTS-FILES",
        "the model directory cannot be put in place",
        where=str(target),
        do="check who else writes there",
    )


def fetch_file(file: FileEntry, range_bytes: int, fetcher: Fetcher) -> bytes:
    """All bytes of a small file, verified range by range and as a whole."""
    if file.size > _SMALL_LIMIT:
        raise DynamoBlobError(
            "WEIGHTS-FILES",
            "a file beside the safetensors is too large",
            where=file.path,
            why=f"{file.size} bytes, at most {_SMALL_LIMIT}",
            do="publish weights as safetensors",
        )
    data = bytearray(file.size)
    home = Segment(file, 0, file.size, [])
    for i, digest in enumerate(file.ranges):
        begin, end = i * range_bytes, min(file.size, (i + 1) * range_bytes)
        fetcher.fetch(RangeJob(file, i, begin, end, digest, home), memoryview(data)[begin:end])
    found = blake3(data).hexdigest()
    if found != file.blake3:
        raise mismatch(file.path, 0, 0, file.size, file.blake3, found, "the ranges together")
    return bytes(data)


def verify_directory(target: Path, resolved: Found) -> DynamoBlobError | None:
    """None if `target` holds exactly the small files of the release, else what is wrong."""
    try:
        verify_small_files(target, resolved.manifest)
        if (target / "manifest.json").read_bytes() != resolved.manifest_bytes:
            raise DynamoBlobError("WEIGHTS-FILES", "another manifest", where=str(target))
    except DynamoBlobError as e:
        return e
    except OSError as e:
        return DynamoBlobError("WEIGHTS-FILES", "the model directory is not complete", where=str(target), why=str(e))
    return None


def verify_small_files(directory: Path, manifest: Manifest, also: Iterable[str] = ()) -> int:
    """Hash every small file in `directory`, refuse files that are neither one of them nor `also`; total bytes. Raises on any difference."""
    total = 0
    names = {"manifest.json", *also}
    for file in small_files(manifest):
        path = directory / safe_path(file.path)
        names.add(file.path)
        try:
            data = path.read_bytes()
        except OSError as e:
            raise DynamoBlobError(
                "WEIGHTS-FILES",
                "a file of the release is missing",
                where=str(path),
                why=str(e.strerror),
                do="remove the directory and start again",
            ) from None
        if (found := blake3(data).hexdigest()) != file.blake3:
            raise mismatch(file.path, 0, 0, file.size, file.blake3, found, str(path))
        total += len(data)
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if not path.is_dir() and name not in names and "__pycache__" not in path.parts:
            raise DynamoBlobError(
                "WEIGHTS-FILES",
                "the model directory holds a file that the release does not name",
                where=str(path),
                do="remove the directory and start again",
            )
    return total


def safe_path(name: str) -> PurePosixPath:
    """`name` if it stays inside the model directory; raises WEIGHTS-MANIFEST-INVALID."""
    path = PurePosixPath(name)
    if (
        path.is_absolute()
        or ".." in path.parts
        or not path.parts
        or "\\" in name
        or "\0" in name
        or name == "manifest.json"
    ):
        raise DynamoBlobError(
            "WEIGHTS-MANIFEST-INVALID",
            "a file of the release would lie outside the model directory",
            where=name,
            do="publish the release again",
        )
    return path
