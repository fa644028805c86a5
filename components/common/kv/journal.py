"""How workers tell each other and the sweeper what happened: one append blob per worker.

Each worker appends its puts, hits and losses every few seconds and reads what the others appended. A
record is one line; a reader that meets a line it does not understand counts and skips it. Losing a
journal loses statistics, never a right answer: listing brings existence back.

    p <name> <bytes> <class> <seconds saved> <parent or -> <unix s>
    h <name> <unix s>
    g <name> <reason> <unix s>
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable

from components.common.kv.catalogue import SKEW_S, Catalogue, Entry, fragment
from components.common.kv.keys import parse_name
from components.common.kv.snapshot import decode, encode
from components.common.kv.store import JOURNAL_PREFIX, SNAPSHOT_OBJECT, KvStore
from components.common.storage.errors import StorageError

log = logging.getLogger(__name__)

_MOST_BYTES = 2 * 2**20  # of one append; Azure allows 4 MiB at least
_MOST_APPENDS = 5000  # of one blob; Azure allows 50,000
_MOST_PERIODS = 4  # between two looks while the store does not answer: a failed request costs milliseconds of CPU
_MOST_WAITING = 200_000  # records not yet appended; beyond it the oldest are lost and counted
_PIECE_BYTES = 8 * 2**20  # read at once
_MOST_OBJECT = 2**32 - 1
_CLASS = re.compile(r"^[a-z0-9]{1,16}$")


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
    """Applies others' records to a catalogue, from where it stopped. `skip`: our own blobs.

    Times in records are those of the workers' clocks. A record was appended between the last read of its journal (or
    the journal's creation) and its last change, by the store's clock: a time outside of that by more than SKEW_S is
    replaced by the nearer end.
    """

    def __init__(self, store: KvStore, catalogue: Catalogue) -> None:
        self._store, self._catalogue = store, catalogue
        self.offsets: dict[str, int] = {}
        self._read_at: dict[str, float] = {}
        self._complained: set[str] = set()
        self.bad_lines = self.records = self.redated = 0

    def read(self, skip: str = "") -> int:
        """One round: list the journals, read what is new; records applied. Raises StorageError."""
        done, seen = 0, set()
        for info in self._store.list(self._store.control, JOURNAL_PREFIX):
            seen.add(info.name)
            if info.name == skip or info.size <= self.offsets.get(info.name, 0):
                continue
            span = (self._read_at.get(info.name, info.created), info.modified)
            while (at := self.offsets.get(info.name, 0)) < info.size:
                data = self._store.read(info.name, at, _PIECE_BYTES)[0] or b""
                whole = data.rpartition(b"\n")[0]
                for number, line in enumerate(whole.split(b"\n") if whole else ()):
                    self._apply(line.decode(errors="replace"), span, info.name, at, number)
                    done += 1
                if whole or data[:1] == b"\n":
                    self.offsets[info.name] = at + len(whole) + 1
                elif len(data) == _PIECE_BYTES:  # no line is so long
                    self._bad(info.name, at, 0, data[:40].decode(errors="replace"))
                    self.offsets[info.name] = at + len(data)
                else:
                    break  # the rest of a line is still to come
            self._read_at[info.name] = info.modified
        for name in self.offsets.keys() - seen:
            del self.offsets[name]
            self._read_at.pop(name, None)
            self._complained.discard(name)
        self.records += done
        return done

    def consumed(self, older_than: float) -> list[str]:
        """Journals read to their end and not written since `older_than` (Unix seconds): the sweeper deletes them."""
        return [
            i.name
            for i in self._store.list(self._store.control, JOURNAL_PREFIX)
            if i.modified < older_than and self.offsets.get(i.name, -1) >= i.size
        ]

    def _apply(self, line: str, span: tuple[float, float], journal: str, at: int, number: int) -> None:
        f = line.split(" ")
        try:
            if not _named(f[1]):
                raise ValueError(f[1])
            if f[0] == "p":
                nbytes, saves, parent = int(f[2]), _number(f[4]), "" if f[5] == "-" else f[5]
                if not (0 <= nbytes <= _MOST_OBJECT and _CLASS.match(f[3]) and (not parent or _named(parent))):
                    raise ValueError(line)
                when = int(self._time(f[6], span))
                self._catalogue.add(Entry(f[1], nbytes, f[3], when, when, 0, saves, fragment(parent)))
            elif f[0] == "h":
                self._catalogue.note_hit(f[1], self._time(f[2], span))
            elif f[0] == "g":
                gone, known = self._time(f[3], span), self._catalogue.get(f[1])
                if known is not None and known.created <= gone:  # put again since: it is there
                    self._catalogue.note_gone(f[1], f[2])
            else:
                raise ValueError(f[0])
        except (ValueError, IndexError, OverflowError):
            self._bad(journal, at, number, line)

    def _bad(self, journal: str, at: int, number: int, line: str) -> None:
        self.bad_lines += 1
        if journal not in self._complained:  # once a journal: a bad writer writes many
            self._complained.add(journal)
            log.warning(
                "KV-JOURNAL-LINE: %s: line %d from byte %d is no record, skipped: %r", journal, number, at, line[:120]
            )

    def _time(self, text: str, span: tuple[float, float]) -> float:
        """A record's time, within what the store's clock allows. Raises ValueError for what is none."""
        when = _number(text)
        first, last = span
        if first - SKEW_S <= when <= last + SKEW_S:
            return when
        self.redated += 1
        return last if when > last else first


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _named(text: str) -> bool:
    return parse_name(text) is not None


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
        wait = self._period_s
        while not self._stop.is_set():
            try:
                self.sync()
                wait = self._period_s
            except StorageError as e:
                self.failures += 1
                self.throttled += e.code in ("STORAGE-THROTTLED", "STORAGE-BUSY")
                self.last_error = e.code
                wait = min(2 * wait, _MOST_PERIODS * self._period_s)
            self._stop.wait(wait)


def snapshot(catalogue: Catalogue, reader: JournalReader, complete: bool) -> bytes:
    """What the sweeper writes: the catalogue and how far its journals were read."""
    return encode(catalogue.entries(), dict(reader.offsets), complete)
