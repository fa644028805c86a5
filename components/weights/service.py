"""What the weight service knows: the release it resolved once and pinned for its life, and where its bytes are."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.loading.plan import is_weights, weight_files
from components.common.loading.report import Report
from components.common.loading.resolve import Found, from_cache, outage, parse_manifest
from components.common.messages.announce import Announcement, Listener
from components.common.messages.weights import Release, Source, Sources
from components.common.registry.manifest import FileEntry
from components.weights.cache import NodeCache
from components.weights.config import WeightServiceConfig
from components.weights.entry import Entry
from components.weights.fill import Filler
from components.weights.peers import Peers
from components.weights.sealed import Sealer
from components.weights.wire import Wire

log = logging.getLogger("dynamo_blob.weights")

_RETRY_S = 1.0
_OFFER_LOOK_S = 0.005


class WeightService:
    """Thread-safe. `resolve` blocks until the release is proven or refused."""

    def __init__(self, config: WeightServiceConfig) -> None:
        self.config = config
        self.found: Found | None = None
        self.release: Release | None = None
        self.error: DynamoBlobError | None = None
        self.final = False
        self.counts: Counter[str] = Counter()
        self.report = Report()
        self.cache: NodeCache | None = None
        self.filler: Filler | None = None
        self.sealer: Sealer | None = None
        self.peers: Peers | None = None
        self.wire: Wire | None = None
        self.listener: Listener | None = None
        self.channel: dict[str, str] = {}
        self._objects: dict[str, FileEntry] = {}
        self._following: dict[str, FileEntry] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @property
    def ready(self) -> bool:
        return self.release is not None

    def resolve(self) -> None:
        """Resolve the release; an outage of the store is waited out, a refusal is final. Raises the refusal."""
        while not self._stop.is_set():
            try:
                self._resolve_once()
                self.listen()
                return
            except DynamoBlobError as e:
                self.error = e
                if not outage(e):
                    self.final = True
                    raise
                log.warning("waiting for the store: %s", e)
                self._stop.wait(_RETRY_S)

    def _resolve_once(self) -> None:
        release = resolve_release(self.config)
        found = release.found
        self._objects = {f.blake3: f for f in found.manifest.files}
        files = weight_files(found.manifest)
        self._following = {f.blake3: after for f, after in itertools.pairwise(files)}
        if self.config.cache_dir and self.config.cache_bytes:
            self._open_cache(found)
        self.found, self.release, self.error = found, release.message, None
        log.info(
            "%s serves %s %s, manifest %s",
            self.config.name,
            release.message.model,
            release.message.version,
            release.message.manifest_digest,
        )

    def _open_cache(self, found: Found) -> None:
        c = self.config
        uid = c.cache_uid if os.geteuid() == 0 else -1
        self.cache = NodeCache(Path(c.cache_dir), c.cache_bytes, uid=uid)
        self.cache.adopt(weight_files(found.manifest))
        self.cache.keep_manifest(found.manifest.digest(), found.manifest_bytes)
        if c.seal:
            self.sealer = Sealer(self.cache, self.report, found.manifest.range_bytes)
        self.filler = Filler(self.cache, found.reader, c.weights, found.manifest.range_bytes, self.report)
        if c.peers:
            size = found.manifest.range_bytes
            self.wire = Wire(self.cache, c.weights.range_in_flight, size)
            self.peers = Peers(c.peer_name or c.listen, c.peers, self.wire, self.report, size, c.peer_deadline_s)
            self.filler.peers = self.peers

    def claim(self, by: str, digest: str, index: int) -> dict[str, Any]:
        """A peer asks before it reads a range from Blob: ready | busy | free. With "ready" comes the offer, if the file is
        registered already: a claim waits for nothing and makes nothing. Else the peer asks for the range."""
        self._range_of(digest, index)
        entry = self.cache.entry(digest) if self.cache else None
        ready = entry is not None and bool(entry.ready[index])
        self.count("claims")
        answer: dict[str, Any] = {"state": self.peers.claimed(by, digest, index, ready) if self.peers else "free"}
        if ready and entry is not None and self.cache is not None and self.wire is not None:
            found = self.wire.offered(entry) if self.cache.unaltered(entry) else None
            if answer["state"] == "ready" and found is not None:
                self.count("offers")
                answer["offer"] = {**found, "have": _have(entry)}
        return answer

    def offer(self, digest: str, index: int, wait_s: float) -> dict[str, Any]:
        """How a peer can read a range here; waits for it up to `wait_s`, reading Blob if nobody does yet.

        `have`: all ranges of the file that it finds there (hex, bit i = range i)."""
        file = self._range_of(digest, index)
        if self.cache is None or self.filler is None or self.wire is None:
            raise DynamoBlobError(
                "WEIGHTS-NO-CACHE", "this weight service offers nothing to peers", where=self.config.name
            )
        entry, work = self.cache.lease(file)
        try:
            self.filler.fill(entry, work)
            end = time.monotonic() + wait_s
            while not entry.ready[index] and entry.error is None and time.monotonic() < end:
                time.sleep(_OFFER_LOOK_S)
            if not entry.ready[index]:
                raise entry.error or DynamoBlobError(
                    "WEIGHTS-PEER-LATE", "the range is not here in time", where=self.config.name
                )
            self.count("offers")
            have = _have(entry)
            return {**self.wire.offer(entry), "have": have}
        finally:
            self.cache.release(entry)

    def _range_of(self, digest: str, index: int) -> FileEntry:
        file = self.file(digest)
        if not 0 <= index < len(file.ranges) or not is_weights(file.path):
            raise DynamoBlobError(
                "WEIGHTS-UNKNOWN-OBJECT", "the release has no such range", why=f"range {index} of {len(file.ranges)}"
            )
        return file

    def lease(self, digest: str) -> Entry:
        """The cache entry of a file, pinned and being filled. Raises WEIGHTS-NO-CACHE, WEIGHTS-CACHE-FULL: read Blob instead."""
        file = self.file(digest)
        if self.cache is None or self.filler is None or not is_weights(file.path):
            raise DynamoBlobError(
                "WEIGHTS-NO-CACHE", "this weight service keeps no such file", where=self.config.name, do="read Blob"
            )
        entry, work = self.cache.lease(file)
        self.filler.fill(entry, work)
        self.count("leases")
        self._read_ahead(file)
        return entry

    def _read_ahead(self, file: FileEntry) -> None:
        """Begin the file that the loader asks for next: it gets its pages, and its ranges come, while this one ends."""
        following = self._following.get(file.blake3)
        if following is None or self.cache is None or self.filler is None or not self.cache.has_room(following):
            return
        try:
            entry, work = self.cache.lease(following)
        except DynamoBlobError:
            return  # whoever leases it is told
        try:
            self.filler.fill(entry, work)
        finally:
            self.cache.release(entry)

    def file(self, digest: str) -> FileEntry:
        file = self._objects.get(digest)
        if file is None:
            raise DynamoBlobError(
                "WEIGHTS-UNKNOWN-OBJECT",
                "the release has no such file",
                why=f"blake3 {digest[:80]}",
                do="ask for objects of the manifest only",
            )
        return file

    def sources(self, digest: str) -> Sources:
        """For each range of the file, where to get it. Blob is always the last resort."""
        file = self.file(digest)
        blob = Source(kind="blob", uri=f"{file.container or self.config.weights.release.container}/{file.blob}")
        entry = self.cache.entry(digest) if self.cache else None
        here = (Source(kind="cache", uri=str(entry.path)),) if entry is not None and entry.state == "present" else ()
        return Sources(object=digest, ranges=tuple((*here, blob) for _ in file.ranges))

    def listen(self) -> None:
        """Hear of promotions, where the plan says that they are announced. Degrades to nothing without NATS.

        Begins with the release pinned: the listener's first look compares the channel with it."""
        if self.config.announce and self.listener is None and not self._stop.is_set():
            self.listener = Listener(self.config.announce, "promoted", self.announced, self.config.name).start()

    def announced(self, item: Announcement | None) -> None:
        """Somebody says that a channel moved: read ours. The release in service stays pinned; status and log say what a restart would serve."""
        from components.common.registry.channel import read_channel
        from components.common.registry.layout import Layout
        from components.common.storage.account import Account

        w = self.config.weights
        if self.release is None or (item is not None and item.model != w.release.model):
            return
        account = Account(w.account)
        try:
            channel = read_channel(account, Layout(w.release.container), w.release.model)
        finally:
            account.close()
        before, now = self.channel.get("current"), channel.current if channel else ""
        self.channel = {"current": now, "serves": self.release.version}
        if now != before and now and now != self.release.version:
            log.warning(
                "%s: %s %s is current now; %s stays in service until a restart", self.config.name, w.release.model, now, self.release.version
            )  # fmt: skip

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[name] += amount

    def status(self) -> dict[str, Any]:
        with self._lock:
            counts = dict(self.counts)
        w = self.config.weights
        return {
            "name": self.config.name, "ready": self.ready, "release": self.release.model_dump(mode="json") if self.release else None,
            "trust": w.trust.require, "loader": w.loader, "unverified": w.loader != "dynamo_blob",
            "error": self.error.as_json() if self.error else None, "counts": counts, "load": self.report.as_json(),
            "cache": self.cache.status() if self.cache else None,
            "peers": self.peers.status() if self.peers else None,
            "channel": self.channel, "announcements": self.listener.status() if self.listener else None,
        }  # fmt: skip

    def close(self) -> None:
        self._stop.set()
        if self.listener:
            self.listener.close()
        if self.filler:
            self.filler.close()
        if self.sealer:
            self.sealer.close()
        if self.wire:
            self.wire.close()
        if self.cache:
            self.cache.close()
        if self.found:
            self.found.reader.close()


def _have(entry: Entry) -> str:
    """See components.weights.offers."""
    return f"{sum(1 << i for i, there in enumerate(bytes(entry.ready)) if there):x}"


class Pinned:
    """A proven release and the message that describes it."""

    def __init__(self, found: Found, message: Release) -> None:
        self.found, self.message = found, message


def resolve_release(config: WeightServiceConfig) -> Pinned:
    """Resolve from the registry, with the read recorded; from the node cache if the store is out and the plan allows it."""
    from components.common.registry import release
    from components.common.storage.account import Account
    from components.common.storage.ranges import RangeReader

    w = config.weights.model_copy(update={"service": "", "cache_dir": config.cache_dir or config.weights.cache_dir})
    account = Account(w.account)
    reader = RangeReader(w.account)
    try:
        found = release.resolve(account, w.release, w.trust, record=True)
        manifest = parse_manifest(found.manifest_bytes, where=found.uri)
        return Pinned(Found(manifest, found.manifest_bytes, reader, None), found.message())
    except DynamoBlobError as e:
        if not outage(e) or w.on_outage != "use_cache" or not w.release.manifest_digest:
            raise
        try:
            manifest, data = from_cache(w)
        except DynamoBlobError:
            raise e from None
        log.warning("the store does not answer: serving the pinned release from the node cache")
        message = Release(
            model=manifest.model, version=manifest.version, manifest_digest=manifest.digest(), weights_digest=manifest.weights_digest,
            manifest_uri="cache", resolved_from="cache",
        )  # fmt: skip
        return Pinned(Found(manifest, data, reader, None, offline=True), message)
    finally:
        account.close()
