"""The release a process serves: its manifest, proven, and how to reach its bytes.

Who delivers the manifest (weight service, registry, node cache) does not matter. It is proven by the
digest in the plan, or by the signatures that `trust` asks for, checked here against the registry.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from components.common.errors import DynamoBlobError
from components.common.loading.client import ServiceClient, ServiceGone
from components.common.loading.config import WeightsConfig
from components.common.loading.report import Report
from components.common.registry.manifest import FORMAT, Manifest, weights_digest
from components.common.storage.errors import StorageError
from components.common.storage.ranges import RangeReader

log = logging.getLogger("dynamo_blob.weights")

_RETRY_S = 0.5
_UNREACHABLE = {
    "STORAGE-THROTTLED", "STORAGE-BUSY", "STORAGE-TIMEOUT", "STORAGE-DISCONNECTED", "STORAGE-REFUSED", "STORAGE-DNS",
}  # fmt: skip
"""Codes that say nothing about the release: the store may answer later."""


@dataclass
class Found:
    """`service` is None when the weight service is absent; `offline` when the store is too (then only the cache is left)."""

    manifest: Manifest
    manifest_bytes: bytes
    reader: RangeReader
    service: ServiceClient | None
    offline: bool = False


def outage(error: BaseException) -> bool:
    return isinstance(error, StorageError) and error.code in _UNREACHABLE


def resolve(config: WeightsConfig, report: Report) -> Found:
    """Wait for the weight service up to its deadline, then ask the registry, then do what `on_outage` says.

    Raises coded errors; never returns anything unproven.
    """
    reader = RangeReader(config.account)
    give_up = time.monotonic() + config.deadline_s
    service_s = config.service_deadline_s
    while True:
        try:
            return _once(config, report, reader, service_s)
        except StorageError as e:
            if not outage(e):
                raise
            report.add("outages")
            found = _in_outage(config, report, reader, e, give_up)
            if found is not None:
                return found
        service_s = 0.2  # `wait`: both are asked again and again
        time.sleep(_RETRY_S)


def _once(config: WeightsConfig, report: Report, reader: RangeReader, service_s: float) -> Found:
    if config.service:
        client = ServiceClient(config.service)
        try:
            client.wait_ready(time.monotonic() + service_s)
            data = client.manifest()
            where = f"{config.service}/v1/manifest"
            manifest = parse_manifest(data, where=where)
            _prove(config, manifest, where)
            report.set(service="present")
            return Found(manifest, data, reader, client)
        except ServiceGone as e:
            log.warning("the weight service does not answer (%s): reading Blob directly", e)
            report.set(service="absent", service_error=str(e))
            report.add("service_absent")
    manifest, data = _from_registry(config)
    return Found(manifest, data, reader, None)


def _in_outage(
    config: WeightsConfig, report: Report, reader: RangeReader, error: StorageError, give_up: float
) -> Found | None:
    """Neither service nor store answers. None = try again."""
    if config.on_outage == "wait" and time.monotonic() < give_up:
        return None
    why = f"weight service: {config.service or 'none'}; store: {error.code} {error.where}"
    if config.on_outage == "use_cache":
        try:
            manifest, data = from_cache(config)
            report.set(service="absent", offline=True)
            log.warning("neither weight service nor store answers: loading from the verified node cache alone")
            return Found(manifest, data, reader, None, offline=True)
        except DynamoBlobError as e:
            why += f"; node cache: {e.what} ({e.why})"
    do = {
        "wait": f"waited {config.deadline_s:g} s; see the store, or raise weights.deadline_s",
        "use_cache": "restore the store, or start where the release is in the node cache",
        "keep_warm_replicas": "replicas that run keep serving; start new ones when the store is back",
        "fail": "restore the store; weights.on_outage: wait would wait for it",
    }[config.on_outage]
    raise DynamoBlobError(
        "WEIGHTS-OUTAGE",
        "neither weight service nor store answers",
        where=error.where,
        why=why,
        do=do,
        on_outage=config.on_outage,
    )


def _from_registry(config: WeightsConfig) -> tuple[Manifest, bytes]:
    from components.common.registry import release  # the SDK costs 0.4 s to import; most workers never need it
    from components.common.storage.account import Account

    account = Account(config.account)
    try:
        found = release.resolve(account, config.release, config.trust, record=False)
    finally:
        account.close()
    return parse_manifest(found.manifest_bytes, where=found.uri), found.manifest_bytes


def _prove(config: WeightsConfig, manifest: Manifest, where: str) -> None:
    """The manifest that the service sent is the pinned one, or the registry proves it."""
    wanted, release = config.release.manifest_digest, config.release
    if wanted:
        return check_pin(wanted, manifest, where)
    if manifest.model != release.model or (release.version and manifest.version != release.version):
        raise DynamoBlobError(
            "WEIGHTS-MANIFEST-MISMATCH", "the weight service serves another release", where=where,
            why=f"expected {release.model} {release.version}, found {manifest.model} {manifest.version}", do="give worker and weight service the same plan",
        )  # fmt: skip
    if config.trust.require != "none":
        pinned = release.model_copy(update={"version": manifest.version, "manifest_digest": manifest.digest()})
        _from_registry(config.model_copy(update={"release": pinned}))


def check_pin(wanted: str, manifest: Manifest, where: str) -> None:
    if manifest.digest() != wanted:
        raise DynamoBlobError(
            "WEIGHTS-MANIFEST-MISMATCH", "the manifest is not the one this plan names", where=where,
            why=f"expected blake3 {wanted}, found {manifest.digest()}",
            do="plan again if the release was changed on purpose; else treat the store as tampered with", expected=wanted, found=manifest.digest(),
        )  # fmt: skip


def cached_manifest(cache_dir: str, digest: str) -> Path:
    return Path(cache_dir) / "manifests" / f"{digest}.json"


def from_cache(config: WeightsConfig) -> tuple[Manifest, bytes]:
    """The manifest kept in the node cache: only one that the plan pins proves itself without the registry."""
    wanted = config.release.manifest_digest
    if not config.cache_dir or not wanted:
        raise DynamoBlobError(
            "WEIGHTS-NO-CACHE",
            "it cannot be used",
            why="no cache directory in the plan" if not config.cache_dir else "the plan pins no manifest digest",
        )
    path = cached_manifest(config.cache_dir, wanted)
    try:
        data = path.read_bytes()
    except OSError as e:
        raise DynamoBlobError(
            "WEIGHTS-NO-CACHE", "the release is not in it", where=str(path), why=str(e.strerror)
        ) from None
    manifest = parse_manifest(data, where=str(path))
    check_pin(wanted, manifest, str(path))
    return manifest, data


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Raises WEIGHTS-MANIFEST-INVALID unless `data` is a canonical manifest whose weights digest fits its files."""
    try:
        manifest = Manifest.model_validate(json.loads(data))
        if manifest.format != FORMAT:
            raise ValueError(f"format {manifest.format}, this version reads {FORMAT}")
        if manifest.canonical() != data:
            raise ValueError("the bytes are not canonical JSON")
        if weights_digest([f.blake3 for f in manifest.files]) != manifest.weights_digest:
            raise ValueError("weights_digest does not fit the files")
        if manifest.range_bytes <= 0:
            raise ValueError("range_bytes must be positive")
    except ValueError as e:
        raise DynamoBlobError(
            "WEIGHTS-MANIFEST-INVALID",
            "the manifest cannot be used",
            where=where,
            why=str(e)[:400],
            do="publish the release again under a new version",
        ) from None
    return manifest
