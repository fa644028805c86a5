"""Messages between a loader and the weight service (HTTP/JSON over a Unix socket, TCP in a cluster).

    GET  /health              200 once the release is resolved and verified, else 503 with an error body
    GET  /v1/release          -> Release
    GET  /v1/manifest         -> the canonical manifest bytes, verbatim
    GET  /v1/sources?object=B -> Sources for the file whose blake3 is B
    GET  /v1/status           -> counters (JSON)
    GET  /v1/lease?object=B   -> JSON lines for as long as the connection is open, which is the lease: first {"path", "then", "ready"}
                                 (ranges that may be read; "then" = the path once complete), then {"ready": [...]}, {"done": true} or {"error"}
    GET  /v1/peer/claim?object=B&range=i&by=S   another service asks who reads range i from Blob: ready (here), busy (being read here), free (yours)
    GET  /v1/peer/range?object=B&range=i&wait=S waits up to S seconds for the range, then what a peer needs to read the file over NIXL: agent, metadata (base64), address

A loader never trusts these answers for content: every range is checked against the manifest whose
digest it was told by its own plan or by a verified signature.

Sealed files come over a second Unix socket (this one's path + HANDOVER_SUFFIX), as descriptors: see
components.weights.handover. The kernel says who listens there and that the file cannot change; that its content
is what the digest says is the service's word (docs/weights.md, "Who trusts whom").
"""

from __future__ import annotations

from typing import Literal

from components.common.config import Config

HANDOVER_SUFFIX = ".fd"


class Source(Config):
    """One place a range can be had, tried in the order given.

    cache: `uri` is an absolute path of a verified, complete file (read-only).
    peer:  `uri` is the Unix socket or host:port of another weight service.
    blob:  `uri` is ``<container>/<blob>`` in the weights account.
    """

    kind: Literal["cache", "peer", "blob"]
    uri: str


class Sources(Config):
    """For each range of one file (manifest order, `range_bytes` each), the ordered places to get it."""

    object: str
    ranges: tuple[tuple[Source, ...], ...]


class Release(Config):
    """What the service resolved at start and pinned for the run."""

    model: str
    version: str
    manifest_digest: str
    weights_digest: str
    manifest_uri: str
    resolved_from: str
    approver: str = ""
    approved_at: str = ""
    age_s: float = 0.0
