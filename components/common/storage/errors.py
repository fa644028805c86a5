"""Storage errors: one code per cause, each with URI, identity and remedy.

`StorageError` is what every storage call of ours raises. `from_http` maps a raw HTTP answer,
`from_exception` whatever azure-core, requests, urllib3, ssl or a socket raised. No message ever
carries a signature: URIs are cut at ``?``.

| code | cause | retry helps |
|---|---|---|
| STORAGE-UNAUTHENTICATED | 401, or 403 of a credential that is malformed, expired or of another account | after renewal |
| STORAGE-CREDENTIAL-EXPIRED | our credential has expired and its issuer wrote no new one | after renewal |
| STORAGE-FORBIDDEN | 403: the identity lacks the right | no |
| STORAGE-NO-CONTAINER, STORAGE-NOT-FOUND | 404 | no |
| STORAGE-CONFLICT | 409, e.g. the blob exists and may be created once only | no |
| STORAGE-PRECONDITION | 412: an ETag or condition did not hold (someone else wrote first) | after re-reading |
| STORAGE-RANGE | 416: the range lies past the end, the blob is shorter than expected | no |
| STORAGE-THROTTLED | 429 | yes, later |
| STORAGE-BUSY | 500, 502, 503, 504 | yes, later |
| STORAGE-DNS, STORAGE-REFUSED, STORAGE-TLS | the endpoint cannot be reached or trusted | no |
| STORAGE-TIMEOUT, STORAGE-DISCONNECTED | no answer in time, or the connection broke | yes |
| STORAGE-REQUEST | any other 4xx | no |
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

from components.common.errors import DynamoBlobError

_SECRET = re.compile(r"(sig|skoid|sktid)=[^&\s\"']+", re.IGNORECASE)
_AUTH_CODES = {
    "AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation", "AuthorizationFailure",
    "AuthorizationProtocolMismatch", "AuthorizationSourceIPMismatch", "KeyBasedAuthenticationNotPermitted",
}  # fmt: skip


class StorageError(DynamoBlobError):
    """A failed storage call. `status` is the HTTP status, 0 when there was no answer."""

    @property
    def status(self) -> int:
        return int(self.data.get("status", 0))

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later without anyone changing anything."""
        return self.code in {"STORAGE-THROTTLED", "STORAGE-BUSY", "STORAGE-TIMEOUT", "STORAGE-DISCONNECTED"}


def clean(text: str) -> str:
    """`text` without signatures, fit for messages and logs."""
    return _SECRET.sub(r"\1=REDACTED", text)


def bare(uri: str) -> str:
    """`uri` without its query, where a SAS would be."""
    return uri.split("?", 1)[0]


def from_http(
    status: int, error_code: str, uri: str, identity: str, *, detail: str = "", retry_after: str = ""
) -> StorageError:
    """The error for an HTTP answer: `error_code` is the value of ``x-ms-error-code`` (may be empty)."""
    code, what, do = _http(status, error_code)
    why = f"HTTP {status}" + (f" {error_code}" if error_code else "") + (f": {clean(detail)}" if detail else "")
    if retry_after:
        why += f" (the service asks to wait {retry_after} s)"
    return StorageError(
        code, what, where=bare(uri), why=f"{why}; identity: {identity}", do=do, status=status, identity=identity,
        storage_code=error_code,
    )  # fmt: skip


def _http(status: int, error_code: str) -> tuple[str, str, str]:
    if status == 401 or (status == 403 and error_code in _AUTH_CODES):
        return (
            "STORAGE-UNAUTHENTICATED", "the storage account does not accept the credential",
            "check that the credential belongs to this account, has not expired or been revoked, and that the clocks agree",
        )  # fmt: skip
    if status == 403:
        return (
            "STORAGE-FORBIDDEN", "the identity lacks the right for this operation",
            "use the identity meant for it (publisher, approver, collector, serving), or grant it the role; check network rules",
        )  # fmt: skip
    if status == 404 and error_code in {"ContainerNotFound", "ContainerBeingDeleted"}:
        return "STORAGE-NO-CONTAINER", "the container does not exist", "create it, or correct its name in the graph"
    if status == 404:
        return (
            "STORAGE-NOT-FOUND",
            "the blob does not exist",
            "check the name; if a release names it, verify the release",
        )
    if status == 409:
        return (
            "STORAGE-CONFLICT", "the state of the blob or container forbids the operation",
            "it exists already, is leased, archived or immutable: read it, then decide",
        )  # fmt: skip
    if status == 412:
        return "STORAGE-PRECONDITION", "someone else wrote first: the condition does not hold", "read again and retry"
    if status == 416:
        return (
            "STORAGE-RANGE",
            "the range lies past the end of the blob",
            "the blob is shorter than expected: verify the release",
        )
    if status == 429:
        return (
            "STORAGE-THROTTLED",
            "the storage account limits the request rate",
            "lower parallelism, or ask for a higher account limit",
        )
    if status >= 500:
        return (
            "STORAGE-BUSY",
            "the storage service cannot answer now",
            "retry later; if it lasts, see the health of the storage account",
        )
    return "STORAGE-REQUEST", "the storage service refused the request", "see the reason above"


def from_exception(error: BaseException, uri: str, identity: str) -> StorageError:
    """The error for an exception of the SDK or of a socket; a StorageError passes through."""
    if isinstance(error, StorageError):
        return error
    response = getattr(error, "response", None)
    status = getattr(error, "status_code", None) or getattr(response, "status_code", None)
    if isinstance(status, int) and status >= 300:
        headers: Mapping[str, str] = getattr(response, "headers", None) or {}
        code = headers.get("x-ms-error-code") or _text(getattr(error, "error_code", "")) or ""
        detail = str(getattr(error, "reason", "") or "")
        return from_http(status, code, uri, identity, detail=detail, retry_after=headers.get("Retry-After", ""))
    code, what, do = _transport(error)
    root = list(_causes(error))[-1]
    return StorageError(
        code, what, where=bare(uri), why=f"{clean(str(root)) or type(root).__name__}; identity: {identity}", do=do,
        status=0, identity=identity,
    )  # fmt: skip


def _transport(error: BaseException) -> tuple[str, str, str]:
    chain = list(_causes(error))
    text = " ".join(str(e) for e in chain)
    names = {type(e).__name__ for e in chain}
    if any(isinstance(e, socket.gaierror) for e in chain) or "NameResolutionError" in names:
        return (
            "STORAGE-DNS",
            "the storage host name does not resolve",
            "check the account URL, DNS and private endpoints",
        )
    if any(isinstance(e, ssl.SSLError) for e in chain) or "SSLError" in names:
        return (
            "STORAGE-TLS",
            "the storage endpoint's certificate is not trusted",
            "set ca_bundle to the private CA, or correct the account URL",
        )
    if any(isinstance(e, TimeoutError) for e in chain) or any("Timeout" in n for n in names) or "timed out" in text:
        return (
            "STORAGE-TIMEOUT",
            "no answer from storage in time",
            "check the network; raise connect_timeout_s or read_timeout_s if it is only slow",
        )
    if any(isinstance(e, ConnectionRefusedError) for e in chain) or "Connection refused" in text:
        return (
            "STORAGE-REFUSED",
            "nothing listens at the storage endpoint",
            "start the store (locally: `dynamo serve` does), or correct the account URL",
        )
    return (
        "STORAGE-DISCONNECTED",
        "the connection to storage broke",
        "retry; if it lasts, check the network and proxies",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and everything under it: causes, contexts, urllib3 reasons, azure inner exceptions."""
    seen: set[int] = set()
    queue: list[Any] = [error]
    while queue:
        item = queue.pop(0)
        if not isinstance(item, BaseException) or id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        queue += [
            getattr(item, "inner_exception", None),
            getattr(item, "reason", None),
            item.__cause__,
            item.__context__,
        ]
        queue += [a for a in item.args if isinstance(a, BaseException)]


def _text(value: Any) -> str:
    return str(getattr(value, "value", value) or "")
