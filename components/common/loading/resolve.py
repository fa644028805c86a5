"""The release a process serves: its manifest, proven, and how to reach its bytes.

The manifest is proven by the digest in the plan, or by the signatures that `trust` asks for; who
delivered it (weight service or Blob) does not matter.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from components.common.errors import DynamoBlobError
from components.common.loading.client import ServiceClient, ServiceGone
from components.common.loading.config import WeightsConfig
from components.common.loading.report import Report
from components.common.registry.manifest import FORMAT, Manifest, weights_digest
from components.common.storage.ranges import RangeReader


@dataclass
class Resolved:
    """`service` is None when the weight service is absent: everything then comes from Blob."""

    manifest: Manifest
    manifest_bytes: bytes
    reader: RangeReader
    service: ServiceClient | None


def resolve(config: WeightsConfig, report: Report, *, reader: RangeReader | None = None) -> Resolved:
    """Wait for the weight service up to its deadline, else ask Blob. Raises coded errors; never returns anything unproven."""
    reader = reader or RangeReader(config.account)
    if config.service:
        client = ServiceClient(config.service)
        try:
            client.wait_ready(time.monotonic() + config.service_deadline_s)
            data = client.manifest()
            manifest = prove(config, data, reader, where=f"{config.service}/v1/manifest")
            report.set(service="present")
            return Resolved(manifest, data, reader, client)
        except ServiceGone as e:
            report.set(service="absent")
            report.set(service_error=str(e))
    data = read_manifest(config, reader)
    return Resolved(prove(config, data, reader, where=manifest_uri(config, reader)), data, reader, None)


def manifest_name(config: WeightsConfig) -> str:
    return f"releases/{config.release.model}/{config.release.version}/manifest.json"


def manifest_uri(config: WeightsConfig, reader: RangeReader) -> str:
    return reader.uri(config.release.container, manifest_name(config))


def read_manifest(config: WeightsConfig, reader: RangeReader) -> bytes:
    deadline = time.monotonic() + config.service_deadline_s
    while True:
        try:
            return reader.read_small(
                config.release.container,
                manifest_name(config),
                deadline=time.monotonic() + config.account.read_timeout_s,
            )
        except DynamoBlobError as e:
            if not getattr(e, "retryable", False) or time.monotonic() + 0.5 > deadline:
                raise
            time.sleep(0.5)


def prove(config: WeightsConfig, data: bytes, reader: RangeReader, *, where: str) -> Manifest:
    """The manifest in `data` if it is the one we may serve; raises otherwise."""
    manifest = parse_manifest(data, where=where)
    wanted = config.release.manifest_digest
    if wanted and manifest.digest() != wanted:
        raise DynamoBlobError(
            "WEIGHTS-MANIFEST-MISMATCH", "the manifest is not the one this plan names", where=where,
            why=f"expected blake3 {wanted}, found {manifest.digest()}", do="plan again if the release was changed on purpose; else treat the store as tampered with",
            expected=wanted, found=manifest.digest(),
        )  # fmt: skip
    if (manifest.model, manifest.version) != (config.release.model, config.release.version or manifest.version):
        raise DynamoBlobError(
            "WEIGHTS-MANIFEST-MISMATCH",
            "the manifest is of another release",
            where=where,
            why=f"{manifest.model} {manifest.version}",
            do="verify the registry",
        )
    return manifest


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Raises WEIGHTS-MANIFEST-INVALID unless `data` is a canonical manifest whose weights digest fits its files."""
    try:
        raw = json.loads(data)
        manifest = Manifest.model_validate(raw)
        if manifest.format != FORMAT:
            raise ValueError(f"format {manifest.format}, this version reads {FORMAT}")
        if manifest.canonical() != data:
            raise ValueError("the bytes are not canonical JSON")
        if weights_digest([f.blake3 for f in manifest.files]) != manifest.weights_digest:
            raise ValueError("weights_digest does not fit the files")
    except ValueError as e:
        raise DynamoBlobError(
            "WEIGHTS-MANIFEST-INVALID",
            "the manifest cannot be used",
            where=where,
            why=str(e)[:400],
            do="publish the release again under a new version",
        ) from None
    return manifest
