"""The relay gives every event its tenant's salt, and the router only what it can use."""

from __future__ import annotations

import msgspec
import zmq

from components.common.kv.events import SaltTable, start_relay
from components.common.messages.salt import compose
from tests.kvtools.proxy import wait_for

SALT = str(compose("acme", "default", b"k" * 32, ""))


def stored(h: int, parent: int | None = None, medium: str = "GPU", salt: str = "", **more: object) -> dict:
    keys = [[salt]] if salt else None
    return {
        "type": "BlockStored", "block_hashes": [h], "parent_block_hash": parent, "token_ids": [1, 2], "block_size": 2,
        "medium": medium, "extra_keys": keys, "lora_name": None, **more,
    }  # fmt: skip


def test_salt_is_inherited_along_the_chain_and_across_tiers() -> None:
    table = SaltTable()
    out = table.rewrite([stored(1, salt=SALT), stored(2, 1), stored(1, medium="CPU"), stored(2, 1, medium="STORAGE")])
    assert [e["cache_salt"] for e in out] == [SALT] * 4
    assert [e["medium"] for e in out] == ["GPU", "GPU", "CPU", "STORAGE"]


def test_what_a_quarantine_appended_is_taken_off_again() -> None:
    """The router asks with the request's own salt."""
    apart = f"~q{'a' * 16}"
    out = SaltTable().rewrite([stored(1, salt=SALT + apart), stored(2, 1), stored(3, salt=apart), stored(4, 3)])
    assert [e.get("cache_salt") for e in out] == [SALT, SALT, None, None]


def test_unsalted_stays_unsalted() -> None:
    out = SaltTable().rewrite([stored(1), stored(2, 1), stored(1, medium="STORAGE")])
    assert len(out) == 3 and not any("cache_salt" in e for e in out)


def test_lower_tier_events_wait_for_the_salt() -> None:
    """A fresh process promotes before HBM has the block: the events come in the other order."""
    table = SaltTable()
    assert table.rewrite([stored(1, medium="STORAGE"), stored(2, 1, medium="STORAGE")]) == []
    out = table.rewrite([stored(1, salt=SALT), stored(2, 1)])
    assert [(e["medium"], e["block_hashes"][0], e["cache_salt"]) for e in out] == [
        ("GPU", 1, SALT), ("STORAGE", 1, SALT), ("GPU", 2, SALT), ("STORAGE", 2, SALT),
    ]  # fmt: skip


def test_what_the_router_would_drop_in_silence_is_dropped_and_counted_here() -> None:
    table = SaltTable()
    out = table.rewrite(
        [
            stored(1, medium="AZURE_BLOB"), stored(2, token_ids=[]), stored(3, block_size=0),
            stored(4, locality="REMOTE", ownership="0:tier"), {"type": "BlockRemoved", "block_hashes": [9], "medium": "CPU"},
        ]
    )  # fmt: skip
    assert [e["block_hashes"][0] for e in out] == [4, 9]
    assert out[0]["locality"] is None and out[0]["ownership"] is None
    assert table.counts["medium"] == 1 and table.counts["placeholder"] == 2


def test_lora_name_is_no_salt() -> None:
    (out,) = SaltTable().rewrite([stored(1, extra_keys=[["adapter", SALT]], lora_name="adapter")])
    assert out["cache_salt"] == SALT


def test_memory_is_bounded() -> None:
    table = SaltTable(remember=100)
    for h in range(1000):
        table.rewrite([stored(h, salt=SALT)])
    for h in range(10_000):
        table.rewrite([stored(10**6 + h, 5 * 10**6 + h, medium="CPU")])
    assert len(table._salts) == 100 and len(table._held) == 4096


def test_relay_over_sockets(tmp_path) -> None:
    context = zmq.Context()
    pub, sub = context.socket(zmq.PUB), context.socket(zmq.SUB)
    pub.bind(f"ipc://{tmp_path}/in")
    relay = start_relay(f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out")
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(f"ipc://{tmp_path}/out")
    try:
        got: list[list[bytes]] = []

        def round_trip() -> bool:
            pub.send_multipart([b"", (7).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [stored(1, salt=SALT)], 0])])
            pub.send_multipart([b"", (8).to_bytes(8, "big"), b"not msgpack"])
            if sub.poll(100):
                got.append(sub.recv_multipart())
            return bool(got)

        wait_for(round_trip, 10)
        topic, seq, payload = got[0]
        assert (topic, seq) == (b"", (7).to_bytes(8, "big"))
        assert msgspec.msgpack.decode(payload)[1][0]["cache_salt"] == SALT
        wait_for(lambda: relay.counts["errors"] > 0, 5, "a bad batch is counted and survived")
    finally:
        relay.stop()
        context.destroy(linger=0)
