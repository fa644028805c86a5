"""One storage account: the control-plane client (small reads and writes, listings, conditions).

Bulk reads of weights and KV go through `ranges` and NIXL; this is for everything else and for uploads.
Every failure is a `StorageError`. Retries are bounded by `AccountConfig.retries`, so an outage shows
within seconds; a 401 or 403 is repeated once after the credential was refreshed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from azure.core import MatchConditions
from azure.core.exceptions import AzureError
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import (
    BlobBlock,
    BlobClient,
    BlobServiceClient,
    BlockState,
    ContainerClient,
    ExponentialRetry,
    StandardBlobTier,
)

from components.common.errors import DynamoBlobError
from components.common.storage.config import AccountConfig
from components.common.storage.credentials import Credential, KeyFileCredential, SasFileCredential, open_credential
from components.common.storage.errors import StorageError, from_exception

_ONE_PUT = 64 * 2**20  # largest body of one Put Blob here; larger data is staged in blocks by the caller


@dataclass(frozen=True)
class BlobInfo:
    """Properties of one blob. `modified` and `created` (0 = not asked for) are unix seconds by the service's clock."""

    name: str
    size: int
    etag: str
    modified: float
    metadata: dict[str, str] = field(default_factory=dict)
    tier: str = ""
    created: float = 0.0


class _SigningTransport(RequestsTransport):
    """Signs each request just before it leaves, so that retries carry the token of the moment."""

    def __init__(self, credential: Credential, pool: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._credential, self._pool = credential, pool

    def open(self) -> None:
        super().open()
        import requests

        if isinstance(self.session, requests.Session):
            for scheme in ("http://", "https://"):
                adapter = self.session.adapters.get(scheme)
                if isinstance(adapter, requests.adapters.HTTPAdapter):
                    adapter.init_poolmanager(self._pool, self._pool, block=False)

    def send(self, request: Any, **kwargs: Any) -> Any:
        plain = request.url
        try:
            for attempt in (1, 2):
                url, headers = self._credential.sign(plain)
                request.url = url
                request.headers.update(headers)
                response = super().send(request, **kwargs)
                rewindable = not hasattr(request.body, "read")
                if (
                    attempt == 2
                    or response.status_code not in (401, 403)
                    or not rewindable
                    or not self._credential.refresh()
                ):
                    return response
            raise AssertionError("unreachable")
        finally:
            request.url = plain


class _Retry(ExponentialRetry):
    """0.25 s, 0.75 s, 2.25 s … with jitter: an outage shows in seconds, a hiccup is bridged."""

    def get_backoff_time(self, settings: dict[str, Any]) -> float:
        return float(0.25 * 3 ** min(settings["count"], 3) * random.uniform(0.7, 1.3))


class Account:
    """Synchronous, thread-safe client of one account.

    pool   most connections kept open.
    hook   called with a short name before each write (tests crash there); None in production.
    """

    def __init__(self, config: AccountConfig, *, pool: int = 16, hook: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.url = config.url.rstrip("/")
        self.credential: Credential = open_credential(config.credential, self.url)
        self.hook = hook
        self.service = BlobServiceClient(
            self.url,
            credential=None,
            transport=_SigningTransport(
                self.credential, pool, connection_timeout=config.connect_timeout_s, read_timeout=config.read_timeout_s,
                **({"connection_verify": config.ca_bundle} if config.ca_bundle else {}),
            ),
            connection_timeout=config.connect_timeout_s,
            read_timeout=config.read_timeout_s,
            retry_policy=_Retry(retry_total=config.retries),
            max_single_put_size=_ONE_PUT,
            max_single_get_size=_ONE_PUT,
            max_chunk_get_size=16 * 2**20,
        )  # fmt: skip

    @property
    def identity(self) -> str:
        return self.credential.identity

    def uri(self, container: str, blob: str = "") -> str:
        """URL of a container or blob, names percent-encoded, without a signature."""
        return f"{self.url}/{container}" + (f"/{quote(blob, safe='/~')}" if blob else "")

    def connection_string(self, container: str = "") -> str:
        """Connection string with a SAS of the moment, for NIXL (which cannot renew it)."""
        if not isinstance(self.credential, SasFileCredential | KeyFileCredential):
            raise DynamoBlobError(
                "STORAGE-NO-SAS", "a connection string needs a SAS or key credential", where=self.url,
                why=f"identity: {self.identity}", do="give NIXL account_url instead",
            )  # fmt: skip
        return f"BlobEndpoint={self.url}/;SharedAccessSignature={self.credential.sas(container)}"

    @contextmanager
    def errors(self, container: str, blob: str = "") -> Iterator[None]:
        """Maps whatever the SDK raises inside to a StorageError for this URI."""
        try:
            yield
        except DynamoBlobError:
            raise
        except (AzureError, OSError) as e:
            raise from_exception(e, self.uri(container, blob), self.identity) from None

    def container(self, name: str) -> ContainerClient:
        return self.service.get_container_client(name)

    def blob(self, container: str, name: str) -> BlobClient:
        return self.service.get_blob_client(container, name)

    def ensure_container(self, name: str) -> bool:
        """Create the container if it is missing; True if this call created it."""
        try:
            with self.errors(name):
                self.container(name).create_container()
            return True
        except StorageError as e:
            if e.data.get("storage_code") == "ContainerAlreadyExists":
                return False
            raise

    def probe(self, container: str) -> None:
        """One cheap read that fails, with its cause, if `container` cannot be used."""
        with self.errors(container):
            next(iter(self.container(container).list_blobs(results_per_page=1).by_page()), None)

    def get(self, container: str, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of the blob, or of the range; a range past the end gives what there is."""
        return self.get_with_etag(container, name, offset, length)[0]

    def get_with_etag(self, container: str, name: str, offset: int = 0, length: int | None = None) -> tuple[bytes, str]:
        with self.errors(container, name):
            stream = self.blob(container, name).download_blob(
                offset=offset if offset or length is not None else None, length=length, max_concurrency=1
            )
            return stream.readall(), str(stream.properties.etag)

    def head(self, container: str, name: str) -> BlobInfo:
        with self.errors(container, name):
            return _info(self.blob(container, name).get_blob_properties())

    def find(self, container: str, name: str) -> BlobInfo | None:
        """`head`, or None when there is no such blob."""
        try:
            return self.head(container, name)
        except StorageError as e:
            if e.code == "STORAGE-NOT-FOUND":
                return None
            raise

    def create(self, container: str, name: str, data: bytes, *, metadata: dict[str, str] | None = None) -> str:
        """Write a blob that must not exist; its ETag. Raises STORAGE-CONFLICT if it does."""
        return self._put(container, name, data, metadata=metadata, overwrite=False)

    def replace(self, container: str, name: str, data: bytes, *, etag: str) -> str:
        """Overwrite the blob if its ETag is still `etag`; the new ETag. Raises STORAGE-PRECONDITION otherwise."""
        return self._put(
            container, name, data, overwrite=True, etag=etag, match_condition=MatchConditions.IfNotModified
        )

    def put(self, container: str, name: str, data: bytes) -> str:
        """Write or overwrite without a condition. Nothing of the registry uses it."""
        return self._put(container, name, data, overwrite=True)

    def _put(self, container: str, name: str, data: bytes, **kwargs: Any) -> str:
        if len(data) > _ONE_PUT:
            raise ValueError(f"{len(data)} bytes in one put; stage blocks instead")
        self._before(f"put {container}/{name}")
        with self.errors(container, name):
            answer = self.blob(container, name).upload_blob(data, length=len(data), **kwargs)
        return str(answer["etag"])

    def stage(self, container: str, name: str, block: str, data: bytes) -> None:
        """Send one block of a blob to be; invisible until `commit`. Staged blocks wait for a week."""
        self._before(f"stage {container}/{name}")
        with self.errors(container, name):
            self.blob(container, name).stage_block(block, data, length=len(data))

    def staged(self, container: str, name: str) -> set[str]:
        """Ids of the blocks that wait for a `commit`."""
        try:
            with self.errors(container, name):
                _, blocks = self.blob(container, name).get_block_list("uncommitted")
        except StorageError as e:
            if e.code == "STORAGE-NOT-FOUND":
                return set()
            raise
        return {str(b.id) for b in blocks}

    def commit(self, container: str, name: str, blocks: list[str], *, tier: str = "") -> None:
        """Make the blob of these blocks, which must not exist yet. Raises STORAGE-CONFLICT if it does."""
        self._before(f"commit {container}/{name}")
        listed = [BlobBlock(b, state=BlockState.LATEST) for b in blocks]
        with self.errors(container, name):
            self.blob(container, name).commit_block_list(
                listed,
                match_condition=MatchConditions.IfMissing,
                standard_blob_tier=StandardBlobTier(tier) if tier else None,
            )

    def _before(self, write: str) -> None:
        if self.hook:
            self.hook(write)

    def touch(self, container: str, name: str, etag: str, mark: str) -> str:
        """Change the blob's ETag and modification time if its ETag is still `etag`; the new ETag."""
        self._before(f"touch {container}/{name}")
        with self.errors(container, name):
            answer = self.blob(container, name).set_blob_metadata(
                {"touched": mark}, etag=etag, match_condition=MatchConditions.IfNotModified
            )
        return str(answer["etag"])

    def delete(self, container: str, name: str, *, etag: str = "") -> None:
        """Delete the blob, if its ETag is still `etag` when one is given."""
        self._before(f"delete {container}/{name}")
        condition: dict[str, Any] = {"etag": etag, "match_condition": MatchConditions.IfNotModified} if etag else {}
        with self.errors(container, name):
            self.blob(container, name).delete_blob(**condition)

    def list(self, container: str, prefix: str = "", *, metadata: bool = False) -> Iterator[BlobInfo]:
        """Blobs under `prefix`, by name."""
        with self.errors(container, prefix):
            for item in self.container(container).list_blobs(
                name_starts_with=prefix or None, include=["metadata"] if metadata else None
            ):
                yield _info(item)

    def append_open(self, container: str, name: str) -> None:
        """Create an empty append blob unless there is one."""
        if self.find(container, name):  # first, because creating over an existing blob asks for more rights
            return
        self._before(f"append-open {container}/{name}")
        try:
            with self.errors(container, name):
                self.blob(container, name).create_append_blob(match_condition=MatchConditions.IfMissing)
        except StorageError as e:
            if e.code not in ("STORAGE-CONFLICT", "STORAGE-FORBIDDEN") or not self.find(container, name):
                raise

    def append(self, container: str, name: str, data: bytes, *, at: int) -> None:
        """Append a block if the blob is `at` bytes long. Raises STORAGE-PRECONDITION otherwise."""
        self._before(f"append {container}/{name}")
        with self.errors(container, name):
            self.blob(container, name).append_block(data, appendpos_condition=at)

    def close(self) -> None:
        self.service.close()
        self.credential.close()


def _info(p: Any) -> BlobInfo:
    return BlobInfo(
        name=p.name, size=int(p.size or 0), etag='"' + str(p.etag).strip('"') + '"', modified=p.last_modified.timestamp(),
        metadata=dict(p.metadata or {}), tier=str(p.blob_tier or ""),
    )  # fmt: skip
