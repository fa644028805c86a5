"""Who reads a range from Blob when several weight services start at once, and getting it from whoever has it.

Before a service reads a range from Blob it claims it at every peer. A peer answers

    ready   it has the range, verified: pull it over NIXL
    busy    it is reading it from Blob, or has the better claim: wait for it there
    free    nobody here works on it, or it leaves it to the one who asks

Only if all are free (or silent) the service reads Blob. Two that claim at once are told apart by rendezvous
hashing: the owner of the range among the two goes on, the other waits for it. So a service waits only for one
that reads Blob or ranks higher for this range: never in a circle. No agreement about who is alive is needed:
a peer that does not answer in time is left out for a while, and at worst a byte is read twice.
Each service begins with the ranges that it owns, so that N starting at once spread over the whole file.

Who says "ready" also says which other ranges of the file it has, and how to read them. For some seconds these are
pulled without asking again: a range costs two requests, hence milliseconds of both interpreters, only while its peer
is itself filling. A peer may have changed or stopped since: of several none has more than half of our landing slots, the first
pull that is late ends all its offers, and wrong bytes are its lie only under an offer made for this very range.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from blake3 import blake3

from components.common.errors import DynamoBlobError
from components.common.loading.client import ServiceClient, ServiceGone
from components.common.loading.report import Report
from components.common.registry.manifest import FileEntry
from components.weights.offers import Offer
from components.weights.wire import NoSlot, PullFailed, Wire

log = logging.getLogger("dynamo_blob.weights")

Answer = Literal["ready", "busy", "free"]
Pulled = Literal["kept", "failed", "wrong", "lack"]
"""`failed`: the peer did not give it. `wrong`: it gave other bytes. `lack`: we could not take it."""
Keep = Callable[[memoryview], memoryview]
"""Puts a range where nobody else can change it, and gives the view of it there, to be verified."""

_ASK_SHARE = 0.3  # of the deadline of a range: how long a peer may take to answer a claim
_ABSENT_S = 2.0  # a peer that did not answer is not asked again for so long
_MARK_S = 30.0  # a peer that stalled; and how often one that lied is asked whether it was restarted
_LOOK_S = 0.1  # who waits for a place looks this often whether it should
_ANSWER = 1 << 20  # bytes: most that a peer may answer
_OFFER_S = 3.0  # how long ranges are pulled under one offer: far less than the peer keeps the file's memory for it


@dataclass(frozen=True, eq=False)
class Have:
    """What a peer said it has of a file."""

    offer: Offer
    until: float

    def has(self, index: int) -> bool:
        return bool(self.offer.have >> index & 1) and time.monotonic() < self.until


def owner(members: list[str], digest: str, index: int) -> str:
    """Rendezvous (highest random weight) owner of a range among `members`."""
    return max(members, key=lambda m: blake3(f"{m}|{digest}|{index}".encode()).digest())


class Peers:
    """`me`: this service's address as the others name it. Claims of others and of our own threads meet here."""

    def __init__(
        self, me: str, addresses: tuple[str, ...], wire: Wire, report: Report, range_bytes: int, pull_s: float
    ) -> None:
        self.me, self.addresses = me, tuple(a for a in addresses if a != me)
        self.wire, self.report, self.range_bytes, self.pull_s = wire, report, range_bytes, pull_s
        self._lock = threading.Lock()
        self._mine: dict[tuple[str, int], Literal["claiming", "fetching"]] = {}
        self._left_to: dict[tuple[str, int], set[str]] = {}
        self._absent: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._have: dict[tuple[str, str], Have] = {}  # by peer and file
        self._pulling: Counter[str] = Counter()  # pulls on their way, those that are late included
        self._late: Counter[str] = Counter()
        # Landing slots of one peer at once: one that hangs leaves half of them to the others, where there are others.
        self._most = max(1, wire.pool.count // min(2, len(self.addresses) or 1)) if wire else 1
        self._room = threading.Condition(self._lock)
        self.marked: dict[str, str] = {}
        self._liars: dict[str, tuple[str, float]] = {}  # those marked: their agent, and when to look for another one

    def order(self, file: FileEntry, ranges: list[int]) -> list[int]:
        """`ranges` with those first that this service owns among all."""
        members = [self.me, *self.addresses]
        return sorted(ranges, key=lambda i: (owner(members, file.blake3, i) != self.me, i))

    # asked by others

    def claimed(self, by: str, digest: str, index: int, ready: bool) -> Answer:
        """A peer is about to read this range from Blob."""
        key = (digest, index)
        with self._lock:
            self._absent.pop(by, None)
            if ready:
                return "ready"
            mine = self._mine.get(key)
            if mine == "claiming" and owner([self.me, by], digest, index) == by:
                self._left_to.setdefault(key, set()).add(by)  # we may have asked it before it began
                return "free"
            return "free" if mine is None else "busy"

    # our own fetching

    def fetch(self, file: FileEntry, index: int, keep: Keep, give_up: Callable[[], bool]) -> bool:
        """Have the range from a peer kept, and verified there. False: read Blob now (we hold the claim until `done`)."""
        key = (file.blake3, index)
        tried: set[str] = set()
        while not give_up():
            self._claim(key)
            others = [p for p in self.addresses if self._usable(p) and p not in tried]
            having = [p for p in others if (have := self._have.get((p, key[0]))) and have.has(index)]
            if not having:
                began = time.perf_counter()
                having = self._decide(key, {p: self._ask(p, key) for p in others})
                self.report.spent("ask", began)
            if not having:
                return False
            free = [p for p in having if self._pulling[p] < self._most]
            source = owner(free or having, *key)  # spreads the load over all that have it
            pulled = self._pull(source, file, index, keep, give_up)
            if pulled == "kept":
                return True
            if pulled == "lack":
                break
            tried.add(source)
        with self._lock:
            self._mine[key] = "fetching"  # nobody is told to go on any more
        return False

    def _claim(self, key: tuple[str, int]) -> None:
        with self._lock:
            self._mine[key] = "claiming"
            self._left_to.pop(key, None)

    def _decide(self, key: tuple[str, int], answers: dict[str, Answer]) -> list[str]:
        """Peers to get the range from; none = it is ours to read from Blob, and whoever asks from now on hears so."""
        with self._lock:
            for peer in self._left_to.get(key, set()) & answers.keys():
                answers[peer] = "ready" if answers[peer] == "ready" else "busy"
            for wanted in ("ready", "busy"):
                if having := [p for p, answer in answers.items() if answer == wanted]:
                    return having
            self._mine[key] = "fetching"
            return []

    def done(self, digest: str, index: int) -> None:
        """The range is verified here, or was given up: no claim of ours is left."""
        with self._lock:
            self._mine.pop((digest, index), None)
            self._left_to.pop((digest, index), None)

    def status(self) -> dict[str, Any]:
        """`marked`: who lied, and how. `left_out`: who was silent, failed or late, and seconds until it is asked again."""
        now = time.monotonic()
        with self._lock:
            return {
                "me": self.me,
                "agent": self.wire.name,
                "peers": list(self.addresses),
                "marked": dict(self.marked),
                "left_out": {p: round(left, 1) for p, until in self._absent.items() if (left := until - now) > 0},
                "pulled_bytes": self.wire.pulled,
                "quarantined": self.wire.pool.quarantined,
                "wire_ready": self.wire.ready,
            }

    def _usable(self, peer: str) -> bool:
        if self._late[peer] >= self._most or time.monotonic() < self._absent.get(peer, 0.0):
            return False
        return peer not in self.marked or self._restarted(peer)

    def _restarted(self, peer: str) -> bool:
        """One that lied is another one once NIXL calls it by another name: ends the mark. Looks now and then."""
        with self._lock:
            agent, again = self._liars.get(peer, ("", 0.0))
            if time.monotonic() < again:
                return False
            self._liars[peer] = (agent, time.monotonic() + _MARK_S)
        try:
            status = json.loads(ServiceClient(peer).get("/v1/status", self.pull_s * _ASK_SHARE, _ANSWER))
            now = status["peers"]["agent"]
        except Exception:
            return False
        if not isinstance(now, str) or now in ("", agent):
            return False
        with self._lock:
            self.marked.pop(peer, None)
            self._liars.pop(peer, None)
        log.warning("peer %s was restarted: asked again", peer)
        return True

    def _mark(self, peer: str, agent: str, why: str) -> None:
        self.report.add("peer_lies")
        with self._lock:
            self.marked[peer], self._liars[peer] = why, (agent, time.monotonic() + _MARK_S)
            self._drop_offers(peer)
        log.error("peer %s %s: not asked again until it restarts", peer, why)

    def _ask(self, peer: str, key: tuple[str, int]) -> Answer:
        path = f"/v1/peer/claim?object={key[0]}&range={key[1]}&by={quote(self.me, safe='')}"
        try:
            answer = json.loads(ServiceClient(peer).get(path, self.pull_s * _ASK_SHARE, _ANSWER))
            state = answer.get("state")
            if state == "ready" and answer.get("offer") is not None:
                self._learn(peer, key[0], answer["offer"])
            return state if state in ("ready", "busy") else "free"
        except Exception as e:  # it is silent, or sends nonsense of any kind
            self._leave_out(peer, _ABSENT_S)
            log.debug("peer %s does not answer a claim: %s", peer, e)
            return "free"

    def _ask_range(self, peer: str, file: FileEntry, index: int) -> Offer:
        """How to read the range there; waits for it as long as the peer works on it. Raises as ServiceClient.get does, ValueError."""
        began = time.perf_counter()
        try:
            path = f"/v1/peer/range?object={file.blake3}&range={index}&wait={self.pull_s * 0.8:.2f}"
            return self._learn(peer, file.blake3, json.loads(ServiceClient(peer).get(path, self.pull_s, _ANSWER)))
        finally:
            self.report.spent("ask", began)

    def _learn(self, peer: str, digest: str, answer: Any) -> Offer:
        """Raises ValueError when `answer` is no offer."""
        offer = Offer.parse(answer)
        with self._lock:
            self._have[peer, digest] = Have(offer, time.monotonic() + _OFFER_S)
        return offer

    def _pull(self, peer: str, file: FileEntry, index: int, keep: Keep, give_up: Callable[[], bool]) -> Pulled:
        if not self.wire.wait_started(self.pull_s):
            return "lack"
        deadline = time.monotonic() + self.pull_s
        have = self._have.get((peer, file.blake3))
        pulled: Pulled = "wrong"
        if have is not None and have.has(index):
            pulled = self._pull_once(peer, have.offer, file, index, keep, deadline, give_up)
        if pulled == "wrong":  # there was no offer, or what it names has changed since
            pulled = self._pull_once(peer, None, file, index, keep, deadline, give_up)
        return pulled

    def _pull_once(
        self, peer: str, offer: Offer | None, file: FileEntry, index: int, keep: Keep, deadline: float,
        give_up: Callable[[], bool],
    ) -> Pulled:  # fmt: skip
        """`offer` None: the peer is asked for one, and wrong bytes are its lie."""
        asked, begin = offer is None, index * self.range_bytes
        count = min(file.size, begin + self.range_bytes) - begin
        with contextlib.ExitStack() as slot:
            try:
                offer = offer or self._ask_range(peer, file, index)
                began = time.perf_counter()
                landed = self._land(slot, peer, offer, begin, count, deadline, give_up)
                self.report.spent("pull", began)
            except NoSlot:
                self.report.add("peer_no_slot")
                return "lack"
            except (ServiceGone, DynamoBlobError) as e:
                self.report.add("peer_gone")
                self._leave_out(peer, _ABSENT_S)
                log.warning("peer %s: %s", peer, str(e).splitlines()[0])
                return "failed"
            except Exception as e:
                self.report.add("peer_late" if getattr(e, "late", False) else "peer_failed")
                self._leave_out(peer, _MARK_S)
                log.warning("peer %s stalled or failed on %s range %d: %s", peer, file.path, index, str(e))
                return "failed"
            if landed is None:
                return "failed"
            began = time.perf_counter()
            kept = keep(landed)
            self.report.spent("keep", began)
            began = time.perf_counter()
            found, wanted = blake3(kept).hexdigest(), file.ranges[index]
            self.report.spent("check", began)
            if found != wanted:
                if blake3(landed).hexdigest() == wanted:
                    self.report.add("kept_wrong")
                    log.error("%s range %d came right from %s, and is wrong where it was put", file.path, index, peer)
                    return "lack"
                if asked:
                    self._mark(
                        peer,
                        offer.agent,
                        f"sent wrong bytes of {file.path} range {index}: expected {wanted}, found {found}",
                    )
                else:
                    self._forget(peer)
                return "wrong"
        self.report.fetched("peer", count)
        self._failures.pop(peer, None)
        return "kept"

    def _land(
        self, slot: contextlib.ExitStack, peer: str, offer: Offer, begin: int, count: int, deadline: float,
        give_up: Callable[[], bool],
    ) -> memoryview | None:  # fmt: skip
        """The bytes, in a slot held by `slot`; None if the peer had no room in time. Raises PullFailed."""
        if not self._enter(peer, deadline, give_up):
            return None
        late = False
        try:
            return slot.enter_context(
                self.wire.pull(offer, begin, count, deadline, lambda: self._leave(peer, late=True))
            )
        except PullFailed as e:
            if late := e.late:
                with self._lock:
                    self._late[peer] += 1
            raise
        finally:
            if not late:
                self._leave(peer)

    def _enter(self, peer: str, deadline: float, give_up: Callable[[], bool]) -> bool:
        """Wait for a place among the pulls from this peer; False at the deadline, and when it is left out meanwhile."""
        with self._room:
            while self._pulling[peer] >= self._most:
                left = deadline - time.monotonic()
                if left <= 0 or give_up() or peer in self.marked or time.monotonic() < self._absent.get(peer, 0.0):
                    return False
                self._room.wait(min(left, _LOOK_S))
            self._pulling[peer] += 1
            return True

    def _leave(self, peer: str, late: bool = False) -> None:
        """A pull is over; `late`: one that was counted as late."""
        with self._room:
            self._pulling[peer] -= 1
            self._late[peer] -= late
            self._room.notify_all()

    def _drop_offers(self, peer: str) -> None:
        self._have = {key: have for key, have in self._have.items() if key[0] != peer}

    def _forget(self, peer: str) -> None:
        with self._lock:
            self._drop_offers(peer)

    def _leave_out(self, peer: str, seconds: float) -> None:
        """Each time in a row twice as long: a peer that hangs costs a few waits, not one per range. No offer of it is used."""
        with self._room:
            self._drop_offers(peer)
            self._failures[peer] = self._failures.get(peer, 0) + 1
            wait = min(_MARK_S, seconds * 2 ** min(9, self._failures[peer] - 1))
            self._absent[peer] = max(self._absent.get(peer, 0.0), time.monotonic() + wait)
            self._room.notify_all()
