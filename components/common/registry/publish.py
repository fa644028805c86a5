"""Publishing: a model directory, or a model that already lies in Blob, becomes a release.

Writes, in this order, each created once:

    manifest.json   names every byte; from here on the collector spares its objects
    objects/...     what is not there yet
    audit intent    who, what, when
    manifest.sig    the release is visible from here on, complete
    audit done

A crash between any two leaves nothing visible; publishing the same content again goes on where it
stopped. Other content under a version that was begun is refused: versions are never reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from components.common.errors import DynamoBlobError
from components.common.registry import audit, signing
from components.common.registry.hashing import Digests, digest_pieces, hash_file
from components.common.registry.headers import tensor_index
from components.common.registry.layout import Layout, check_names, check_paths
from components.common.registry.manifest import RANGE_BYTES, FileEntry, Manifest, TensorEntry, weights_digest
from components.common.registry.progress import Meter, Report
from components.common.registry.signing import SigningKey
from components.common.registry.upload import upload
from components.common.storage.account import Account
from components.common.storage.errors import StorageError

SIGNATURE_FORMAT = "dynamo-blob.signature/1"
TOMBSTONE_FORMAT = "dynamo-blob.tombstone/1"  # in the signature's place: the version was retired


@dataclass(frozen=True)
class Published:
    """What a publish did. `uploaded` and `skipped` are bytes of objects; `seconds` of hashing and of sending."""

    manifest: Manifest
    digest: str
    uri: str
    uploaded: int
    skipped: int
    hash_s: float
    upload_s: float
    resumed: bool


def publish_directory(
    account: Account,
    container: str,
    directory: Path,
    model: str,
    version: str,
    *,
    key: SigningKey | None = None,
    provenance: dict[str, Any] | None = None,
    progress: Report | None = None,
    parallel: int = 4,
    range_bytes: int = RANGE_BYTES,
) -> Published:
    """Publish every file under `directory` (hidden ones left out) as `model` `version`.

    key         the publisher's; None makes an unsigned release, which only `trust.require: none` serves.
    provenance  facts about the origin (source, license, remote_code, ...); part of the manifest, so of what is signed.

    Raises REGISTRY-NAME, REGISTRY-EMPTY, REGISTRY-SOURCE, REGISTRY-VERSION-TAKEN, REGISTRY-SAFETENSORS, REGISTRY-SOURCE-CHANGED, STORAGE-*.
    """  # fmt: skip
    check_names(model, version)
    layout = Layout(container)
    paths = scan(directory)
    hashing = Meter("hash", sum(p.stat().st_size for _, p in paths), progress)
    files: list[tuple[Path, FileEntry]] = []
    tensors: list[TensorEntry] = []
    for name, path in paths:
        d = hash_file(path, range_bytes, hashing.add)
        files.append((path, _entry(name, d, layout.object(d.blake3))))
        if name.endswith(".safetensors"):
            with path.open("rb") as f:
                tensors += tensor_index(name, d.size, lambda at, n, f=f: _read_at(f, at, n))
    hashing.finish()
    manifest = _manifest(model, version, [e for _, e in files], tensors, provenance, range_bytes)
    resumed = begin(account, layout, manifest)
    sending = Meter("upload", sum(e.size for _, e in files), progress)
    upload(account, layout, files, range_bytes, sending, parallel)
    sending.finish()
    commit(account, layout, manifest, key)
    return _published(
        account,
        layout,
        manifest,
        sending.done - sending.skipped,
        sending.skipped,
        hashing.seconds,
        sending.seconds,
        resumed,
    )


def adopt(
    account: Account,
    container: str,
    uri: str,
    model: str,
    version: str,
    *,
    key: SigningKey | None = None,
    provenance: dict[str, Any] | None = None,
    progress: Report | None = None,
    parallel: int = 4,
    range_bytes: int = RANGE_BYTES,
) -> Published:
    """Make a release of the blobs under ``az://container/prefix`` of the same account, hashed by streaming, copied nowhere.

    The release pins their content: should anyone change them, serving refuses. Memory: `parallel` ranges.
    """  # fmt: skip
    check_names(model, version)
    layout = Layout(container)
    source, prefix = parse_az(uri)
    infos = {
        name: info
        for info in account.list(source, prefix + "/" if prefix else "")
        if not _hidden(name := info.name[len(prefix) + 1 if prefix else 0 :])
    }
    if not infos:
        raise DynamoBlobError(
            "REGISTRY-EMPTY", "there is nothing to publish", where=uri, do="check container and prefix"
        )
    hashing = Meter("hash", sum(i.size for i in infos.values()), progress)
    check_paths(infos, uri)
    entries: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    for name, info in sorted(infos.items()):
        pieces = stream(account, source, info.name, info.size, range_bytes, parallel)
        d = digest_pieces(pieces, hashing.add)
        if account.head(source, info.name).etag != info.etag:
            raise DynamoBlobError(
                "REGISTRY-SOURCE-CHANGED",
                "a blob changed while it was being read",
                where=account.uri(source, info.name),
                do="publish again when nobody writes",
            )
        entries.append(_entry(name, d, info.name, source))
        if name.endswith(".safetensors"):
            tensors += tensor_index(name, d.size, lambda at, n, b=info.name: account.get(source, b, at, n))
    hashing.finish()
    manifest = _manifest(model, version, entries, tensors, {"source": uri} | (provenance or {}), range_bytes)
    resumed = begin(account, layout, manifest)
    commit(account, layout, manifest, key)
    return _published(account, layout, manifest, 0, hashing.done, hashing.seconds, 0.0, resumed)


def begin(account: Account, layout: Layout, manifest: Manifest) -> bool:
    """Create the manifest, the root that protects its objects; True if it was there already, equal."""
    name, mark = layout.manifest(manifest.model, manifest.version), layout.signature(manifest.model, manifest.version)
    data = manifest.canonical()
    if account.find(layout.container, mark) and TOMBSTONE_FORMAT.encode() in account.get(layout.container, mark):
        raise _retired(account, layout, manifest)
    try:
        account.create(layout.container, name, data)
        return False
    except StorageError as e:
        if e.code != "STORAGE-CONFLICT":
            raise
    there = account.get(layout.container, name)
    if there == data:
        return True
    raise DynamoBlobError(
        "REGISTRY-VERSION-TAKEN", f"version {manifest.version} of {manifest.model} exists with other content",
        where=account.uri(layout.container, name), why=_difference(there, manifest), do="publish under a new version: versions are immutable",
    )  # fmt: skip


def commit(account: Account, layout: Layout, manifest: Manifest, key: SigningKey | None) -> None:
    """Record the publication and make the release visible. Its objects must exist."""
    model, version, digest = manifest.model, manifest.version, manifest.digest()
    name = layout.signature(model, version)

    def record(phase: str) -> None:
        audit.append(
            account, layout, model=model, action="publish", phase=phase, version=version, manifest=digest, key=key
        )

    existing = account.find(layout.container, name)
    if existing is None:
        record("intent")
        document = {"format": SIGNATURE_FORMAT, "model": model, "version": version, "manifest": digest}
        data = key.sign(document | {"signed_at": audit.now_iso()}) if key else signing.unsigned(document)
        try:
            account.create(layout.container, name, data)
            record("done")
            return
        except StorageError as e:
            if e.code != "STORAGE-CONFLICT":
                raise
    there = signing.parse(
        account.get(layout.container, name),
        code="REGISTRY-SIGNATURE-CORRUPT",
        what="the signature",
        where=account.uri(layout.container, name),
    )
    if there.get("format") == TOMBSTONE_FORMAT:
        raise _retired(account, layout, manifest)
    if there.get("manifest") != digest or (key and there.get("key") != key.public):
        raise DynamoBlobError(
            "REGISTRY-VERSION-TAKEN", f"version {version} of {model} is signed already, by another key or for other content",
            where=account.uri(layout.container, name), why=f"signed by {str(there.get('key'))[:16] or 'nobody'}…", do="publish under a new version",
        )  # fmt: skip


def scan(directory: Path) -> list[tuple[str, Path]]:
    """(relative POSIX name, path) of the files to publish, by name; links to files are followed, hidden names left out.

    Nothing else is left out in silence. Raises REGISTRY-EMPTY, REGISTRY-NAME, and REGISTRY-SOURCE for a link
    that points nowhere or at a directory, a pipe, or anything else that is not a file.
    """  # fmt: skip
    if not directory.is_dir():
        raise DynamoBlobError(
            "REGISTRY-EMPTY", "the model directory does not exist", where=str(directory), do="check the path"
        )
    found = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if _hidden(name) or (path.is_dir() and not path.is_symlink()):
            continue
        if not path.is_file():
            raise DynamoBlobError(
                "REGISTRY-SOURCE", "the model directory has something that is not a file", where=ascii(str(path))[1:-1],
                why="a link that points nowhere or at a directory" if path.is_symlink() else "not a regular file",
                do="complete the download, copy what the link points at, or remove it",
            )  # fmt: skip
        found.append((name, path))
    if not found:
        raise DynamoBlobError(
            "REGISTRY-EMPTY", "there is nothing to publish", where=str(directory), do="check the path"
        )
    check_paths((name for name, _ in found), str(directory))
    return found


def stream(account: Account, container: str, blob: str, size: int, range_bytes: int, parallel: int) -> Iterator[bytes]:
    """The ranges of a blob in order, up to `parallel` in flight. Raises STORAGE-RANGE if it is shorter than `size`."""
    with ThreadPoolExecutor(parallel, thread_name_prefix="stream") as pool:
        waiting: deque[tuple[int, Future[bytes]]] = deque()
        at = 0
        while at < size or waiting:
            while at < size and len(waiting) < parallel:
                n = min(range_bytes, size - at)
                waiting.append((n, pool.submit(account.get, container, blob, at, n)))
                at += n
            n, future = waiting.popleft()
            piece = future.result()
            if len(piece) != n:
                raise StorageError(
                    "STORAGE-RANGE", "the blob is shorter than it was", where=account.uri(container, blob),
                    why=f"{len(piece)} bytes of {n}", do="someone writes to it: stop them, then try again", status=0,
                )  # fmt: skip
            yield piece


def parse_az(uri: str) -> tuple[str, str]:
    """(container, prefix) of ``az://container/prefix``. Raises REGISTRY-NAME."""
    parts = urlsplit(uri)
    if parts.scheme != "az" or not parts.netloc or parts.query or parts.fragment:
        raise DynamoBlobError(
            "REGISTRY-NAME",
            f"'{uri}' is not az://container/prefix",
            do="write az://container/prefix, without account or signature",
        )
    return parts.netloc, parts.path.strip("/")


def _hidden(name: str) -> bool:
    return not name or name.endswith("/") or any(part.startswith(".") for part in name.split("/"))


def _entry(name: str, d: Digests, blob: str, container: str = "") -> FileEntry:
    return FileEntry(
        path=name, size=d.size, blake3=d.blake3, sha256=d.sha256, blob=blob, container=container, ranges=d.ranges
    )


def _manifest(
    model: str,
    version: str,
    files: Sequence[FileEntry],
    tensors: Sequence[TensorEntry],
    provenance: dict[str, Any] | None,
    range_bytes: int,
) -> Manifest:
    return Manifest(
        model=model, version=version, range_bytes=range_bytes, files=tuple(sorted(files, key=lambda f: f.path)),
        tensors=tuple(sorted(tensors, key=lambda t: (t.file, t.begin, t.end, t.name))),
        weights_digest=weights_digest([f.blake3 for f in files]), provenance=provenance or {},
    )  # fmt: skip


def _retired(account: Account, layout: Layout, manifest: Manifest) -> DynamoBlobError:
    return DynamoBlobError(
        "REGISTRY-VERSION-RETIRED", f"version {manifest.version} of {manifest.model} was retired",
        where=account.uri(layout.container, layout.signature(manifest.model, manifest.version)), do="publish under a new version: versions are never reused",
    )  # fmt: skip


def _difference(there: bytes, manifest: Manifest) -> str:
    try:
        other = Manifest.model_validate_json(there)
    except ValueError:
        return "the manifest there cannot be read"
    a, b = ({f.path: f.blake3 for f in m.files} for m in (other, manifest))
    changed = sorted(p for p in a.keys() | b.keys() if a.get(p) != b.get(p))
    return "files differ: " + ", ".join(changed[:5]) if changed else "the files are equal, provenance or format differ"


def _published(
    account: Account,
    layout: Layout,
    m: Manifest,
    uploaded: int,
    skipped: int,
    hash_s: float,
    upload_s: float,
    resumed: bool,
) -> Published:
    uri = account.uri(layout.container, layout.manifest(m.model, m.version))
    return Published(m, m.digest(), uri, uploaded, skipped, hash_s, upload_s, resumed)


def _read_at(f: Any, at: int, n: int) -> bytes:
    f.seek(at)
    return bytes(f.read(n))
