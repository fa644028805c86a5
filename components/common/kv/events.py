"""Relay of vLLM's KV events to Dynamo's router, with each block's salt.

vLLM puts the salt into `extra_keys` of the first block of a prefix, and offload events carry none;
Dynamo's router ignores `extra_keys` and indexes such blocks as unsalted, so that one tenant's blocks
would earn credit for another's request (never a hit: the engine's hashes hold the salt) and the
tenant's own repeats none. The relay adds ``cache_salt`` to every BlockStored: from the first block's
extra keys, inherited along parent hashes, remembered by block hash for events of lower tiers.
Events whose salt is not known yet wait for the block's GPU event (bounded); payloads a router cannot
use (no tokens) and media it does not know are dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from typing import Any

import msgspec
import zmq

from components.common.messages import salt as salts

log = logging.getLogger(__name__)

MEDIA = ("GPU", "CPU", "STORAGE", None)
_REMEMBER = 1 << 18
"""Block hashes whose salt is remembered; the oldest are forgotten."""
_HOLD = 4096
"""Lower-tier events held until their block's salt is known; beyond it the oldest are dropped."""


class SaltTable:
    """Adds salts to decoded event batches. Pure: no sockets."""

    def __init__(self, remember: int = _REMEMBER) -> None:
        self._salts: OrderedDict[Any, str] = OrderedDict()
        self._held: OrderedDict[Any, dict[str, Any]] = OrderedDict()
        self._remember = remember
        self.counts: Counter[str] = Counter()

    def rewrite(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The events a router should see, in order."""
        out: list[dict[str, Any]] = []
        for event in events:
            if event.get("medium") not in MEDIA:
                self.counts["medium"] += 1
            elif event.get("type") == "BlockStored":
                self._stored(event, out)
            else:
                # AllBlocksCleared as well: lower tiers keep their blocks, so their salts stay
                self._forget(event)
                out.append(event)
        return out

    def _stored(self, event: dict[str, Any], out: list[dict[str, Any]]) -> None:
        if not event.get("token_ids") or not event.get("block_size"):
            self.counts["placeholder"] += 1
            return
        salt = self._salt(event)
        if salt is None:
            self._hold(event)
            return
        out.append(self._with(event, salt))
        for h in map(_key, event["block_hashes"]):
            self._salts[h] = salt
            self._salts.move_to_end(h)
            if h in self._held:
                self._stored(self._held.pop(h), out)
        while len(self._salts) > self._remember:
            self._salts.popitem(last=False)

    def _with(self, event: dict[str, Any], salt: str) -> dict[str, Any]:
        # locality and ownership make Dynamo 1.6.1 drop the event in silence
        event = {**event, "locality": None, "ownership": None}
        if salt:
            self.counts["salted"] += 1
            event["cache_salt"] = salt
        return event

    def _hold(self, event: dict[str, Any]) -> None:
        self.counts["held"] += 1
        self._held[_key(event["block_hashes"][-1])] = event
        while len(self._held) > _HOLD:
            self._held.popitem(last=False)
            self.counts["unknown_salt"] += 1

    def _forget(self, event: dict[str, Any]) -> None:
        for h in event.get("block_hashes") or ():
            held = self._held.get(_key(h))
            if held is not None and held.get("medium") == event.get("medium"):
                del self._held[_key(h)]

    def _salt(self, event: dict[str, Any]) -> str | None:
        """The salt, "" for none, None when it cannot be known."""
        for h in event["block_hashes"]:
            known = self._salts.get(_key(h))
            if known is not None:
                return known
        parent = event.get("parent_block_hash")
        if parent is not None:
            return self._salts.get(_key(parent))
        if event.get("medium") in ("CPU", "STORAGE"):
            return None  # offload events carry no extra keys: only the GPU event of the block tells
        return salt_of(event)


def salt_of(event: dict[str, Any]) -> str:
    """The salt in the first block's extra keys: the string of our composed shape, else vLLM's tag, else the only plain string.

    Without what a quarantine appended: the router asks with the request's own salt.
    """
    return salts.bare(_salt_of(event))


def _salt_of(event: dict[str, Any]) -> str:
    keys = (event.get("extra_keys") or [None])[0] or ()
    plain = []
    for key in keys:
        if isinstance(key, (list, tuple)) and len(key) == 2 and key[0] == "cache_salt":
            return str(key[1])
        if isinstance(key, str) and key != event.get("lora_name"):
            plain.append(key)
    for text in plain:
        if salts.parse(salts.bare(text)):
            return text
    return plain[0] if plain else ""


class Relay:
    """One SUB/PUB hop in a daemon thread. `stop` ends it and frees both sockets."""

    def __init__(self, source: str, target: str) -> None:
        self.table = SaltTable()
        self.counts = self.table.counts
        self._context = zmq.Context()
        self._source: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._source.setsockopt(zmq.SUBSCRIBE, b"")
        self._source.setsockopt(zmq.RCVHWM, 0)
        self._source.connect(source)
        self._target: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._target.setsockopt(zmq.LINGER, 0)
        self._target.bind(target)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2.0)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        last: int | None = None
        while not self._stop.is_set():
            if not self._source.poll(100):
                continue
            topic, seq, payload = self._source.recv_multipart()
            self.counts["batches"] += 1
            number = int.from_bytes(seq, "big")
            if last is not None and number != last + 1:
                self.counts["lost_batches"] += max(0, number - last - 1)
            last = number
            try:
                batch = msgspec.msgpack.decode(payload)
                batch[1] = self.table.rewrite(batch[1])
                payload = msgspec.msgpack.encode(batch)
            except Exception as e:  # one bad batch must not end the relay; the router only loses credit
                self.counts["errors"] += 1
                log.warning("a batch of KV events was not understood: %s", e)
                continue
            self._target.send_multipart([topic, seq, payload])


def start_relay(source: str, target: str) -> Relay:
    """Relay from vLLM's endpoint (ipc://..., connected to) to `target` (ipc://..., bound). Keep it; `stop()` ends it."""
    return Relay(source, target)


def _key(block_hash: Any) -> Any:
    return bytes(block_hash) if isinstance(block_hash, (bytes, bytearray)) else block_hash
