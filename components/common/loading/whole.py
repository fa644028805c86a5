"""A model directory for loaders of others: every file of the release on disk, each range verified as it arrived.

`<root>/whole/<weights digest>/` appears in one rename, complete, made once per node: workers that start together
wait for the first. A directory that is found is hashed again before it is used. What the other loader reads from
it later is verified by nobody: hence `allow_unverified`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.loading.config import WeightsConfig
from components.common.loading.fetch import Fetcher, Stopped, mismatch
from components.common.loading.files import materialise_small_files, safe_path, verify_small_files, write_small_files
from components.common.loading.inflight import InFlight
from components.common.loading.mapped import MappedFile
from components.common.loading.plan import RangeJob, Segment, weight_files
from components.common.loading.report import Report
from components.common.loading.session import Session, open_session
from components.common.registry.manifest import FileEntry

log = logging.getLogger("dynamo_blob.weights")

PACKAGES = {"runai_streamer": "runai_model_streamer", "modelexpress": "modelexpress"}
"""What vLLM imports for a loader, where that is a package of its own."""
_LOOK_S = 0.1
_BLOCK = 8 << 20


def check_loader(weights: WeightsConfig) -> None:
    """Refuse a loader that was not allowed or cannot run here. Raises WEIGHTS-UNVERIFIED-LOADER, WEIGHTS-LOADER-MISSING."""
    loader = weights.loader
    if loader == "dynamo_blob":
        return
    if not weights.allow_unverified:
        raise DynamoBlobError(
            "WEIGHTS-UNVERIFIED-LOADER", f"the loader '{loader}' does not verify weights", where="engine.loader", why="a flipped bit would be served",
            do="use dynamo_blob, or say engine.allow_unverified: true",
        )  # fmt: skip
    package = PACKAGES.get(loader)
    if package and find_spec(package) is None:
        raise DynamoBlobError(
            "WEIGHTS-LOADER-MISSING", f"the loader '{loader}' cannot run here", where="engine.loader", why=f"the Python package {package} is not installed",
            do="this graph is rendered for an image of its own that has it (`dynamo render`); it is not run here",
        )  # fmt: skip


def model_directory(weights: WeightsConfig) -> Path:
    """The engine's model path for the plan's loader; its name is the weights digest. Raises DynamoBlobError.

    Small files alone where the loader brings the weights itself (ours, ModelExpress), else the whole model.
    """
    check_loader(weights)
    if weights.loader in ("dynamo_blob", "modelexpress"):
        return materialise_small_files(weights)
    return materialise_model(weights)


def materialise_model(weights: WeightsConfig) -> Path:
    """The whole model, made or hashed again now; at most `budget_bytes` of memory. A failure is also in the report."""
    report = Report(weights.report)
    report.set(loader=weights.loader, unverified=True)
    try:
        with open_session(weights, None, report) as session:
            path = _materialise(session, time.monotonic() + weights.deadline_s)
        report.finish()
        return path
    except DynamoBlobError as e:
        report.fail(e)
        raise


def _materialise(session: Session, deadline: float) -> Path:
    manifest = session.manifest
    root = Path(session.config.root) / "whole"
    target = root / manifest.weights_digest
    root.mkdir(parents=True, exist_ok=True)
    with _alone(root / f".{target.name}.lock", deadline):
        if target.exists():
            bad = _wrong(target, session)
            if bad is None:
                return target
            log.warning("the model directory is made again: %s", bad)
        for left in root.glob(f".{target.name}.*.part"):  # of a worker that was killed
            shutil.rmtree(left, ignore_errors=True)
        work = root / f".{target.name}.{secrets.token_hex(4)}.part"
        try:
            _download(session, work, deadline)
            (work / "manifest.json").write_bytes(session.resolved.manifest_bytes)
            if target.exists():
                os.rename(target, root / f".{target.name}.{secrets.token_hex(4)}.bad.part")
            os.rename(work, target)
        except OSError as e:
            raise DynamoBlobError(
                "WEIGHTS-FILES", "the model directory cannot be written", where=str(target), why=e.strerror or str(e),
                do=f"the model needs {sum(f.size for f in manifest.files)} bytes there, {shutil.disk_usage(root).free} are free",
            ) from None  # fmt: skip
        finally:
            for left in root.glob(f".{target.name}.*.part"):
                shutil.rmtree(left, ignore_errors=True)
    return target


@contextlib.contextmanager
def _alone(path: Path, deadline: float) -> Iterator[None]:
    """One worker of the node at a time; the lock ends with its process."""
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DynamoBlobError(
                        "WEIGHTS-DEADLINE", "another worker did not finish the model directory in time", where=str(path),
                        do="see its log; raise weights.deadline_s if the link is only slow",
                    ) from None  # fmt: skip
                time.sleep(_LOOK_S)
        yield


def _download(session: Session, work: Path, deadline: float) -> None:
    """Every file of the release into `work`, ranges in parallel, each written once its digest was right."""
    c, manifest, report = session.config, session.manifest, session.report
    need, free = sum(f.size for f in manifest.files), shutil.disk_usage(work.parent).free
    if need > free:
        raise DynamoBlobError(
            "WEIGHTS-FILES", "the model directory has no room", where=str(work.parent), why=f"{need} bytes wanted, {free} free",
            do="give weights.root a larger disk, or use the loader dynamo_blob: it needs none", need_bytes=need, free_bytes=free,
        )  # fmt: skip
    stop = threading.Event()
    most = max(1, min(c.range_in_flight, c.budget_bytes // manifest.range_bytes))
    gate = InFlight(most)
    fetcher = Fetcher(
        session.resolved.reader, c.release.container, report, retries=c.range_retries, range_s=c.range_deadline_s, deadline=deadline,
        gate=gate, stopped=stop.is_set,
    )  # fmt: skip
    work.mkdir()
    write_small_files(work, manifest, fetcher)
    buffers = threading.local()

    def one(job: RangeJob, mapped: MappedFile | None, fd: int) -> None:
        if not gate.enter(stop.is_set):
            raise Stopped
        done = 0
        try:
            if mapped is None:
                if not hasattr(buffers, "own"):
                    buffers.own = np.empty(manifest.range_bytes, dtype=np.uint8)
                view = buffers.own[: job.end - job.begin].data
            else:
                view = mapped.array[job.begin : job.end].data
            fetcher.fetch(job, view, mapped)
            _write(fd, view, job.begin)
            done = len(view)
        except BaseException:
            stop.set()
            raise
        finally:
            gate.leave(done)

    with ThreadPoolExecutor(most, thread_name_prefix="weights") as pool:
        for file in weight_files(manifest):
            path = work / safe_path(file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            mapped = session.place(file)
            assert mapped is None or isinstance(mapped, MappedFile)  # ranks share memory only inside an engine
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                os.ftruncate(fd, file.size)
                running = [pool.submit(one, job, mapped, fd) for job in _ranges(file, manifest.range_bytes)]
                errors = [e for future in running if (e := future.exception()) is not None]
            finally:
                os.close(fd)
            if errors:
                raise next((e for e in errors if not isinstance(e, Stopped)), errors[0])


def _ranges(file: FileEntry, size: int) -> list[RangeJob]:
    home = Segment(file, 0, file.size, [])
    return [
        RangeJob(file, i, i * size, min(file.size, (i + 1) * size), digest, home)
        for i, digest in enumerate(file.ranges)
    ]


def _write(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _wrong(target: Path, session: Session) -> DynamoBlobError | None:
    """None if `target` holds exactly the release; every byte is hashed."""
    manifest, weights = session.manifest, weight_files(session.manifest)
    try:
        total = verify_small_files(target, manifest, also=[f.path for f in weights])
        if (target / "manifest.json").read_bytes() != session.resolved.manifest_bytes:
            raise DynamoBlobError("WEIGHTS-FILES", "another manifest", where=str(target))
        for file in weights:
            path, hasher = target / safe_path(file.path), blake3()
            with path.open("rb", buffering=0) as f:
                while block := f.read(_BLOCK):
                    hasher.update(block)
            if (found := hasher.hexdigest()) != file.blake3:
                raise mismatch(file.path, 0, 0, file.size, file.blake3, found, str(path))
            total += file.size
    except DynamoBlobError as e:
        return e
    except OSError as e:
        return DynamoBlobError("WEIGHTS-FILES", "the model directory is not complete", where=str(target), why=str(e))
    session.report.fetched("disk", total)
    return None
