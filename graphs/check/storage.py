"""Accounts, trust and the release."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from components.common.errors import nearest
from graphs.check.base import Context
from graphs.launch.samples import SAMPLES
from graphs.load import Finding
from graphs.spec import TrustSpec

_KEY = re.compile(r"^[0-9a-f]{64}$")


def accounts(c: Context) -> Iterator[Finding]:
    s = c.spec.storage
    for role in ("weights", "kv"):
        own = getattr(s, role)
        where = c.graph.place("storage", role, "url")
        if not own.url and s.embedded == "none":
            yield Finding(
                "CHECK-STORAGE-MISSING",
                f"no {role} account",
                where,
                "neither storage.embedded nor a URL is given",
                f"set storage.{role}.url, or storage.embedded: azurite",
            )
        if own.url:
            parts = urlsplit(own.url)
            if parts.query or parts.username:
                yield Finding(
                    "CHECK-STORAGE-URL",
                    f"the {role} URL carries more than an endpoint",
                    where,
                    "credentials never stand in a graph",
                    "give https://ACCOUNT.blob.core.windows.net alone",
                )
            elif parts.scheme != "https" and not loopback(parts.hostname or ""):
                yield Finding(
                    "CHECK-STORAGE-URL",
                    f"the {role} endpoint is not https",
                    where,
                    f"{own.url}: tokens and KV would cross the network in the clear",
                    "use https",
                )
    if (s.weights.url, s.weights.container) == (s.kv.url, s.kv.container) and (s.weights.url or s.embedded == "none"):
        yield Finding(
            "CHECK-STORAGE-SHARED",
            "weights and KV share a container",
            c.graph.place("storage", "kv", "container"),
            "a purge could not be proven where versions or soft delete keep blobs, and would meet releases",
            "use two accounts",
        )
    elif s.weights.url and s.weights.url == s.kv.url:
        yield Finding(
            "CHECK-STORAGE-SHARED",
            "weights and KV share an account",
            c.graph.place("storage", "kv", "url"),
            "the weights account keeps versions and deleted blobs; KV there survives its purge",
            "use two accounts",
            "warning",
        )


def loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def trust(c: Context) -> Iterator[Finding]:
    own, embedded = c.spec.trust, c.spec.storage.embedded == "azurite"
    where = c.graph.place("trust", "require") if own else c.graph.place("storage")
    require = own.require if own else ("local" if embedded else "approval")
    if require in ("none", "local") and c.spec.storage.weights.url:
        yield Finding(
            "CHECK-TRUST",
            f"trust.require: {require} with a real account",
            where,
            "weights nobody approved would be served",
            "set trust.require: approval and name the keys",
        )
    elif require == "none":
        yield Finding(
            "CHECK-TRUST-NONE",
            "releases need no signature",
            where,
            "digests prove only that the bytes are those of the manifest",
            "remove `trust`: this machine signs its own releases",
            "warning",
        )
    # A graph for clusters gets its trust from the cluster's own file when it is rendered.
    later = own is None and c.spec.runtime.discovery == "kubernetes"
    publishers, approvers = (own.publisher_keys, own.approver_keys) if own else ([], [])
    if require in ("signature", "approval") and not publishers and not later:
        yield Finding(
            "CHECK-TRUST-KEYS",
            f"trust.require: {require} without publisher keys",
            where,
            "no release could ever be accepted",
            "list trust.publisher_keys",
        )
    if require == "approval" and not approvers and not later:
        yield Finding(
            "CHECK-TRUST-KEYS",
            "trust.require: approval without approver keys",
            where,
            "no release could ever be accepted",
            "list trust.approver_keys",
        )
    if own:
        yield from _keys(c, own, "trust")


def cluster_trust(c: Context) -> Iterator[Finding]:
    """The cluster's own trust, which counts where the graph names none."""
    found = c.spec.cluster.trust if c.spec.cluster else None
    if found is None or (c.spec.trust and c.spec.trust.require != "local"):
        return
    if found.require in ("none", "local"):
        yield Finding(
            "CHECK-TRUST",
            f"trust.require: {found.require} in a cluster",
            c.graph.place("cluster", "trust", "require"),
            "weights nobody approved would be served",
            "set trust.require: approval and name the keys",
        )
    yield from _keys(c, found, "cluster", "trust")


def _keys(c: Context, found: TrustSpec, *at: str) -> Iterator[Finding]:
    for key in sorted(set(found.publisher_keys) & set(found.approver_keys)):
        yield Finding(
            "CHECK-TRUST-SAME-KEY",
            "a key both publishes and approves",
            c.graph.place(*at, "approver_keys"),
            f"{key[:16]}…: one person could put weights into service alone",
            "give the approver a key of its own",
        )
    for name, keys in (("publisher_keys", found.publisher_keys), ("approver_keys", found.approver_keys)):
        for i, key in enumerate(keys):
            if not _KEY.match(key):
                yield Finding(
                    "CHECK-TRUST-KEY",
                    "not an Ed25519 public key",
                    c.graph.place(*at, name, i),
                    "64 lower-case hex digits are expected",
                    "print it with `dynamo release keygen`",
                )


def release(c: Context) -> Iterator[Finding]:
    m = c.spec.model
    if c.spec.cluster is not None and not m.manifest_digest:
        yield Finding(
            "CHECK-RELEASE-UNPINNED",
            "the release is not pinned by digest",
            c.graph.place("model"),
            "the cluster's admission policy refuses releases without a digest; two pods could load different versions of a channel",
            "set model.version and model.manifest_digest (`dynamo release show`)",
        )
    if m.source and c.spec.storage.embedded != "azurite":
        yield Finding(
            "CHECK-RELEASE-SOURCE",
            "model.source with a real account",
            c.graph.place("model", "source"),
            "`serve` publishes to the embedded store only",
            "publish with `dynamo publish`, then remove source",
        )
    if m.source.startswith("sample:") and (name := m.source.removeprefix("sample:")) not in SAMPLES:
        yield Finding(
            "RELEASE-SOURCE",
            f"there is no sample model '{name}'",
            c.graph.place("model", "source"),
            nearest(name, SAMPLES),
            "name one of them, or a directory",
        )
    elif m.source and not m.source.startswith("sample:") and c.spec.storage.embedded == "azurite":
        directory = (Path(c.graph.document.name).parent / m.source).resolve()
        if not (directory / "config.json").is_file():
            yield Finding(
                "RELEASE-SOURCE",
                "the model directory holds no model",
                c.graph.place("model", "source"),
                f"no config.json in {directory}; a store that lacks the release could not get it",
                "give a directory with config.json, tokenizer and safetensors, or sample:NAME",
                "warning",  # the store may hold the release already
            )
    if m.source and not m.version:
        yield Finding(
            "CHECK-RELEASE-VERSION",
            "model.source without a version",
            c.graph.place("model", "source"),
            "what is published needs a version",
            "set model.version",
        )


RULES = (accounts, trust, cluster_trust, release)
