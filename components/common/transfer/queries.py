"""Existence questions on their own agent, so that big transfers do not delay them.

A question blocks its thread for as long as the store likes (a hung one: minutes). So every question
has a deadline kept here, and a worker that is stuck is left behind for a new one; at most
`_MAX_WORKERS` are alive, after that questions are answered "not known" at once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from components.common.transfer.base import Known

log = logging.getLogger(__name__)

_MAX_WORKERS = 3
_BATCH = 128
_REOPEN_S = 2.0


class Asker(Protocol):
    """A way to ask: `query` blocks and raises when the answer is not known; `retire` drops it."""

    def query(self, names: list[str]) -> list[bool]: ...

    def retire(self) -> None: ...


class _Question:
    __slots__ = ("answered", "counts", "deadline", "known", "names")

    def __init__(self, names: list[str], deadline: float, known: Known, counts: bool) -> None:
        self.names, self.deadline, self.known, self.counts, self.answered = names, deadline, known, counts, False


class _Worker:
    """One thread and its own way to ask; `since` = when the question in hand was taken up."""

    def __init__(self, open_asker: Callable[[], Asker], owner: Queries) -> None:
        self.since: float | None = None
        self.expires: float | None = None
        self.abandoned = False
        self._open_asker, self._owner = open_asker, owner
        self.thread = threading.Thread(target=self._run, name="transfer-queries", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asker: Asker | None = None
        opened = 0.0
        with contextlib.suppress(Exception):
            asker, opened = self._open_asker(), time.monotonic()
        while not self.abandoned:
            question = self._owner.next()
            if question is None:
                break
            self.since = time.monotonic()
            answer: dict[str, bool | None] = {}
            try:
                if asker is None or self._owner.stale():
                    asker, opened = self._renew(asker), time.monotonic()
                for i in range(0, len(question.names), _BATCH):
                    part = question.names[i : i + _BATCH]
                    answer.update(zip(part, asker.query(part), strict=True))
                good = True
            except Exception as e:
                log.warning("existence of %d objects is not known: %s", len(question.names), e)
                good = False
                if time.monotonic() - opened > _REOPEN_S:  # perhaps the credential was revoked
                    with contextlib.suppress(Exception):
                        asker, opened = self._renew(asker), time.monotonic()
            self.since = None
            self._owner.answer(question, answer, good)
        if asker is not None:
            asker.retire()

    def _renew(self, old: Asker | None) -> Asker:
        new: Asker = self._open_asker()
        if old is not None:
            old.retire()
        return new


class Queries:
    """`outcome(good)` is told how each counted question ended, for the breaker; `expired` = time for a new asker."""

    def __init__(
        self,
        open_asker: Callable[[], Asker],
        outcome: Callable[[bool], None],
        expired: Callable[[], bool] = lambda: False,
    ) -> None:
        self._open_asker, self._outcome, self.stale = open_asker, outcome, expired
        self._queue: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._waiting: list[_Question] = []
        self._workers = [_Worker(open_asker, self)]
        self._closed = threading.Event()
        self.counts: Counter[str] = Counter()
        self._watch = threading.Thread(target=self._run, name="transfer-deadlines", daemon=True)
        self._watch.start()

    def ask(self, names: Sequence[str], deadline: float, known: Known, counts: bool = True) -> None:
        """`counts` False: the question explains something that was counted already."""
        question = _Question(list(names), deadline, known, counts)
        with self._lock:
            self._waiting.append(question)
            self._lock.notify()
        self.counts["asked"] += len(question.names)
        self._queue.put(question)

    def next(self) -> _Question | None:
        while True:
            question = self._queue.get()
            if question is None or not question.answered:
                return question

    def answer(self, question: _Question, found: dict[str, bool | None], good: bool) -> None:
        if self._settle(question, found) and question.counts:
            self._outcome(good)

    def close(self, wait_s: float) -> bool:
        """True when no question is left in a store's hands, after `wait_s` seconds at most."""
        end = time.monotonic() + wait_s
        self._closed.set()
        with self._lock:
            self._lock.notify()
        workers = list(self._workers)
        for _ in workers:
            self._queue.put(None)
        for worker in workers:
            worker.thread.join(max(0.0, end - time.monotonic()))
        return not any(worker.thread.is_alive() for worker in workers)

    @property
    def stuck(self) -> int:
        return sum(w.abandoned and w.thread.is_alive() for w in self._workers)

    def _settle(self, question: _Question, found: dict[str, bool | None]) -> bool:
        with self._lock:
            if question.answered:
                return False
            question.answered = True
            self._waiting.remove(question)
        try:
            question.known({n: found.get(n) for n in question.names})
        except Exception:
            log.exception("an existence answer could not be reported")
        return True

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                now = time.monotonic()
                late = [q for q in self._waiting if now >= q.deadline]
                if not late:  # nothing asked, nothing to watch: an idle or shut-out tier wakes nobody
                    first = min((q.deadline for q in self._waiting), default=None)
                    self._lock.wait(None if first is None else first - now)
                    continue
            for question in late:
                if self._settle(question, {}):
                    self.counts["late"] += 1
                    if question.counts:
                        self._outcome(False)
            if late:
                self._replace_stuck(now)

    def _replace_stuck(self, now: float) -> None:
        self._workers = [w for w in self._workers if w.thread.is_alive()]
        if any(w.since is None and not w.abandoned for w in self._workers) or len(self._workers) >= _MAX_WORKERS:
            return
        for worker in self._workers:
            worker.abandoned = True
        self.counts["replaced"] += 1
        self._workers.append(_Worker(self._open_asker, self))
