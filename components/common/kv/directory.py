"""Upkeep of a worker's own directory tier (NVMe): purge, TTL and age purges reach its files too.

The sweeper and `dynamo purge` cannot see a node's disk, so each worker keeps its own directory, in a thread:

  * every `look_s`: files under a tenant's older generation go (nobody asks for them: the generation is part of the
    name), and files written before an age purge of their tenant;
  * every `walk_s`: what is over by its class goes. A file's date is its put, its access time the last hit (set here, so
    that it survives the process and mounts without access times); the class is the one the tenants file gives its
    tenant now. A class that became ephemeral is over at once.

Workers that share a directory may all do this. A step looks at `_STEP` files and then rests. Nothing that is no object
of ours is touched; a put under way is a ``.part``, left alone until it is older than any put may be.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from components.common.errors import DynamoBlobError
from components.common.kv.catalogue import SKEW_S
from components.common.kv.classes import Classes
from components.common.kv.epochs import Epochs, generation_of
from components.common.kv.generations import PURGES
from components.common.kv.index import MemoryIndex
from components.common.kv.keys import is_tenant, parse_name
from components.common.kv.store import KvStore
from components.common.messages.tenants import TenantsFile
from components.common.storage.account import BlobInfo

log = logging.getLogger(__name__)

AGE = ".age.json"
_STEP, _REST_S = 256, 0.02
_PART_S = 3600.0
_LEAST_WALK_S, _MOST_WALK_S = 5.0, 600.0
_HITS = 1 << 16  # hits remembered between two looks; more are hits of files that live on anyway


class DirectoryIndex(MemoryIndex):
    """What the tier asks, and remembers hits for the upkeep."""

    def __init__(self) -> None:
        super().__init__()
        self.hits: deque[tuple[str, float]] = deque(maxlen=_HITS)

    def note_hit(self, name: str) -> None:
        super().note_hit(name)
        self.hits.append((name, time.time()))


class Owners:
    """{tenant hash: class} by the tenants file of now; the last good file while it is broken."""

    def __init__(self, path: str) -> None:
        self._path, self._raw, self._known = path, b"", dict[str, str]()

    def __call__(self) -> dict[str, str]:
        try:
            raw = Path(self._path).read_bytes() if self._path else b""
            if raw != self._raw:
                file = TenantsFile.load(self._path)
                self._known, self._raw = {h: file.class_of(t) for h, t in file.by_hash().items()}, raw
        except (OSError, DynamoBlobError):
            pass  # whoever follows the file says so
        return self._known


class Upkeep:
    """Keeps `root`. `start`, `close`; `look` is one round, in the caller's thread.

    epochs    purge generations; None = no Blob tier, so no purges
    control   where age purges are noted; None = none
    """

    def __init__(
        self,
        root: Path,
        classes: Callable[[], Classes],
        owners: Callable[[], dict[str, str]],
        index: DirectoryIndex,
        *,
        epochs: Epochs | None = None,
        control: KvStore | None = None,
        look_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root, self._classes, self._owners, self._index = root, classes, owners, index
        self._epochs, self._control, self._look_s, self._clock = epochs, control, look_s, clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._walked_at, self._seen = -1e18, 0
        self._ages: dict[str, float] = {}
        self._aged: dict[str, float] = {}
        self._etags: dict[str, str] = {}
        self.counters: Counter[str] = Counter()
        self.problem = ""

    def start(self) -> Upkeep:
        self._thread = threading.Thread(target=self._run, name="kv-directory", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(5.0)

    def status(self) -> dict[str, object]:
        return {**self.counters, "problem": self.problem}

    def look(self) -> None:
        """One round. Raises OSError for a directory that cannot be read."""
        self._note_hits()
        self._read_ages()
        now, owners, classes = self._clock(), self._owners(), self._classes()
        walk = now - self._walked_at >= self._walk_s(classes)
        for tenant in _folders(self._root):
            if not is_tenant(tenant.name):
                continue
            generation = self._epochs.generation(tenant.name) if self._epochs else None
            cutoff = self._ages.get(tenant.name, 0.0)
            fresh_age = cutoff > self._aged.get(tenant.name, 0.0)
            rule = classes.get(owners.get(tenant.name, classes.default))
            for space in self._inside(tenant):
                if self._stop.is_set():
                    return
                if not is_tenant(space.name):  # 32 hex digits as well
                    continue
                if generation is not None and generation_of(space.name) < generation:
                    self._keep(space, lambda _: "purged")
                    self._drop_empty(space)
                elif walk or fresh_age:

                    def over(s: os.stat_result) -> str:
                        if s.st_mtime <= cutoff:  # noqa: B023 - called within this turn
                            return "age"
                        at, last = s.st_mtime, max(s.st_atime, s.st_mtime)
                        end = min(last + rule.ttl_s, at + rule.max_ttl_s)  # noqa: B023
                        return "ttl" if rule.ephemeral or now >= end else ""  # noqa: B023

                    self._keep(space, over)
            if cutoff:
                self._aged[tenant.name] = cutoff
        if walk:
            self._walked_at = now
            self.counters["walks"] += 1

    def _keep(self, space: Path, over: Callable[[os.stat_result], str]) -> None:
        """Delete the objects below a namespace's folder that are over, a step at a time."""
        now = self._clock()
        for path in self._files(space):
            self._seen += 1
            if self._seen % _STEP == 0 and self._stop.wait(_REST_S):
                return
            with self._unless_refused():
                s = path.stat(follow_symlinks=False)
                if path.suffix == ".part":
                    if now - s.st_mtime > _PART_S:
                        path.unlink()
                    continue
                name = path.relative_to(self._root).as_posix()
                if parse_name(name) is None:
                    continue
                if s.st_mtime > now + SKEW_S:  # written while this node's clock was ahead
                    os.utime(path, (now, now))
                    self.counters["redated"] += 1
                    s = path.stat()
                if why := over(s):
                    path.unlink()
                    self._index.note_gone(name, why)
                    self.counters[f"deleted_{why}"] += 1
                    self.counters["deleted_bytes"] += s.st_size

    @contextlib.contextmanager
    def _unless_refused(self) -> Iterator[None]:
        """One file or folder that cannot be read or deleted (another user's) keeps no other."""
        try:
            yield
        except FileNotFoundError:
            pass  # another worker of this node was first
        except OSError as e:
            self.problem = f"{type(e).__name__}: {e}"[:200]
            self.counters["failures"] += 1

    def _inside(self, folder: Path) -> list[Path]:
        with self._unless_refused():
            return list(_folders(folder))
        return []

    def _files(self, space: Path) -> Iterator[Path]:
        """Files two levels below a namespace: <2 hex>/<name>."""
        for folder in self._inside(space):
            with self._unless_refused(), os.scandir(folder) as found:
                for e in found:
                    if e.is_file(follow_symlinks=False):
                        yield folder / e.name

    def _drop_empty(self, space: Path) -> None:
        """Folders of an older generation; one with a put under way is not empty and stays."""
        for folder in (*self._inside(space), space, space.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _note_hits(self) -> None:
        while self._index.hits:
            name, at = self._index.hits.popleft()
            with contextlib.suppress(OSError):
                path = self._root / name
                os.utime(path, (at, path.stat().st_mtime))

    def _read_ages(self) -> None:
        """Age purges, as their states say: {tenant: everything written before}. One that cannot be read counts later."""
        if self._control is None:
            return
        try:
            for info in self._control.list(self._control.control, PURGES):
                if info.name.endswith(AGE) and self._etags.get(info.name) != info.etag:
                    self._read_age(info, self._control.read(info.name)[0] or b"")
        except DynamoBlobError as e:
            self.problem = f"age purges: {type(e).__name__}: {e}"[:200]

    def _read_age(self, info: BlobInfo, raw: bytes) -> None:
        try:
            body = json.loads(raw)
            cutoff = min(max(float(body["cutoff"]), float(body.get("aged", 0.0))), info.modified)
            self._ages[str(body["tenant"])] = max(self._ages.get(str(body["tenant"]), 0.0), cutoff)
            self._etags[info.name] = info.etag
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            self.problem = f"age purges: {info.name}: {type(e).__name__}: {e}"[:200]

    def _walk_s(self, classes: Classes) -> float:
        shortest = min(rule.ttl_s for _, rule in classes.items())
        return min(_MOST_WALK_S, max(_LEAST_WALK_S, shortest / 10))

    def _run(self) -> None:
        while not self._stop.is_set():
            self.problem = ""
            try:
                self.look()
            except Exception as e:  # a disk that fails: the tier's breakers see it too; tried again
                self.problem = f"{type(e).__name__}: {e}"[:200]
                self.counters["failures"] += 1
            self._stop.wait(self._look_s)


def _folders(path: Path) -> Iterator[Path]:
    try:
        with os.scandir(path) as found:
            names = [e.name for e in found if e.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from (path / n for n in names)
