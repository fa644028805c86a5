"""How workers tell each other and the sweeper what happened: one append blob per worker.

Each worker appends its puts, hits and losses every few seconds and reads what the others appended. A
record is one line; a reader that meets a line it does not understand counts and skips it. Losing a
journal loses statistics, never a right answer: listing brings existence back.

    p <name> <bytes> <class> <seconds saved> <parent or -> <unix s>
    h <name> <unix s>
    g <name> <reason> <unix s>
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from components.common.kv.catalogue import Catalogue, Entry, fragment
from components.common.kv.snapshot import decode, encode
from components.common.kv.store import JOURNAL_PREFIX, SNAPSHOT_OBJECT, KvStore
from components.common.storage.errors import StorageError

_MOST_BYTES = 2 * 2**20  # of one append; Azure allows 4 MiB at least
_MOST_APPENDS = 5000  # of one blob; Azure allows 50,000
_MOST_WAITING = 200_000  # records not yet appended; beyond it the oldest are lost and counted


class JournalWriter:
    """Collects records and appends them. `add` never blocks; `flush` does I/O."""

    def __init__(self, store: KvStore, worker: str, clock: Callable[[], float] = time.time) -> None:
        self._store, self._worker, self._clock = store, worker, clock
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)
        self._lock = threading.Lock()
        self._blob = ""
        self._appends = self._size = 0
        self.lost = self.appended = 0

    @property
    def blob(self) -> str:
        return self._blob

    def add(self, *fields: object) -> None:
        with self._lock:
            self.lost += len(self._waiting) == _MOST_WAITING
            self._waiting.append(" ".join(map(str, fields)))

    def flush(self) -> int:
        """Append what is waiting; records written. Raises StorageError; records of a failed append stay waiting."""
        done = 0
        while self._waiting:
            with self._lock:
                lines, size = [], 0
                while self._waiting and size < _MOST_BYTES:
                    lines.append(self._waiting.popleft())
                    size += len(lines[-1]) + 1
            data = ("\n".join(lines) + "\n").encode()
            try:
                if not self._blob or self._appends >= _MOST_APPENDS:
                    self._blob = f"{JOURNAL_PREFIX}{self._worker}-{os.getpid()}-{int(self._clock() * 1e3)}.log"
                    self._appends = self._size = 0
                    self._store.account.append_open(self._store.control, self._blob)
                self._store.account.append(self._store.control, self._blob, data, at=self._size)
            except StorageError:
                with self._lock:
                    self._waiting.extendleft(reversed(lines))
                self._blob = (
                    ""  # the append may have happened: go on in a fresh blob; records are idempotent but for hits
                )
                raise
            self._store.requests["write"] += 1
            self._appends, self._size = self._appends + 1, self._size + len(data)
            done += len(lines)
        self.appended += done
        return done


class JournalReader:
    """Applies others' records to a catalogue, from where it stopped. `skip`: our own blobs."""

    def __init__(self, store: KvStore, catalogue: Catalogue) -> None:
        self._store, self._catalogue = store, catalogue
        self.offsets: dict[str, int] = {}
        self.bad_lines = self.records = 0

    def read(self, skip: str = "") -> int:
        """One round: list the journals, read what is new; records applied. Raises StorageError."""
        done, seen = 0, set()
        for info in self._store.list(self._store.control, JOURNAL_PREFIX):
            seen.add(info.name)
            at = self.offsets.get(info.name, 0)
            if info.name == skip or info.size <= at:
                continue
            data, _ = self._store.read(info.name, at)
            whole = (data or b"").rpartition(b"\n")[0]
            for line in whole.decode(errors="replace").split("\n") if whole else ():
                self._apply(line)
                done += 1
            self.offsets[info.name] = at + (len(whole) + 1 if whole else 0)
        for name in self.offsets.keys() - seen:
            del self.offsets[name]
        self.records += done
        return done

    def consumed(self, older_than: float) -> list[str]:
        """Journals read to their end and not written since `older_than` (Unix seconds): the sweeper deletes them."""
        return [
            i.name
            for i in self._store.list(self._store.control, JOURNAL_PREFIX)
            if i.modified < older_than and self.offsets.get(i.name, -1) >= i.size
        ]

    def _apply(self, line: str) -> None:
        f = line.split(" ")
        try:
            if f[0] == "p":
                at = int(float(f[6]))
                parent = "" if f[5] == "-" else f[5]
                self._catalogue.add(Entry(f[1], int(f[2]), f[3], at, at, 0, float(f[4]), fragment(parent)))
            elif f[0] == "h":
                self._catalogue.note_hit(f[1], float(f[2]))
            elif f[0] == "g":
                known = self._catalogue.get(f[1])
                if known is not None and known.created <= float(f[3]):  # put again since: it is there
                    self._catalogue.note_gone(f[1], f[2])
            else:
                raise ValueError(f[0])
        except (ValueError, IndexError):
            self.bad_lines += 1


class SharedIndex:
    """The index a worker's tier asks: its catalogue, kept up to date with the other workers in the background.

    Start: the sweeper's snapshot if there is one, then the journals. `lookup` and the notes never block.
    """

    def __init__(
        self,
        store: KvStore,
        worker: str,
        *,
        capacity: int = 2**20,
        period_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.catalogue = Catalogue(capacity, complete_s=max(10.0, 5 * period_s), clock=clock)
        self._store, self._clock, self._period_s = store, clock, period_s
        self.writer = JournalWriter(store, worker, clock)
        self.reader = JournalReader(store, self.catalogue)
        self._based = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures = self.throttled = 0
        self.last_error = ""
        self.lookup = self.catalogue.lookup
        self.lookup_many = self.catalogue.lookup_many

    def start(self) -> SharedIndex:
        self._thread = threading.Thread(target=self._run, name="kv-index", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop, and append what is waiting (one try)."""
        self._stop.set()
        if self._thread:
            self._thread.join(self._period_s + 10)
        try:
            self.writer.flush()
        except StorageError as e:
            self.last_error = e.code

    def note_put(self, name: str, nbytes: int, cls: str, seconds_saved: float, parent: str | None = None) -> None:
        self.catalogue.note_put(name, nbytes, cls, seconds_saved, parent)
        self.writer.add("p", name, nbytes, cls, f"{seconds_saved:.6g}", parent or "-", f"{self._clock():.3f}")

    def note_hit(self, name: str) -> None:
        self.catalogue.note_hit(name)
        self.writer.add("h", name, f"{self._clock():.3f}")

    def note_gone(self, name: str, reason: str) -> None:
        self.catalogue.note_gone(name, reason)
        self.writer.add("g", name, reason.replace(" ", "-"), f"{self._clock():.3f}")

    def sync(self) -> None:
        """One round, in the caller's thread: base once, append ours, read theirs. Raises StorageError."""
        if not self._based:
            raw, _ = self._store.read(SNAPSHOT_OBJECT)
            found = decode(raw) if raw else None
            if found is not None:
                for entry in found.entries:
                    self.catalogue.add(entry)
                self.reader.offsets.update(found.offsets)
                # a snapshot of everything, and journals since: what is in neither is not there
                self._based = found.complete
        self.writer.flush()
        self.reader.read(skip=self.writer.blob)
        if self._based:
            self.catalogue.mark_complete()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.sync()
            except StorageError as e:
                self.failures += 1
                self.throttled += e.code in ("STORAGE-THROTTLED", "STORAGE-BUSY")
                self.last_error = e.code
            self._stop.wait(self._period_s)


def snapshot(catalogue: Catalogue, reader: JournalReader, complete: bool) -> bytes:
    """What the sweeper writes: the catalogue and how far its journals were read."""
    return encode(catalogue.entries(), dict(reader.offsets), complete)
