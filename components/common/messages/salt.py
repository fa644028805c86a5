"""How a tenant travels from the gateway to the worker: inside the cache salt.

Dynamo's frontend passes `cache_salt` to its KV router and to the engine, and refuses fields it does
not know; so the composed salt is the one carrier. It reads ``<tenant>-<class>-<mac>``:

    tenant  32 hex: blake3 of the tenant's name, the prefix of its Blob objects
    class   retention class, [a-z0-9]+
    mac     32 hex: HMAC-SHA256(tenant key, client's salt or empty), shortened

Only the gateway composes it; it drops what clients send in this shape.

Inside a worker a salt may carry suffixes (components/common/kv/quarantine.py): ``~q`` and ``~r`` set KV apart that was
computed after a quarantine, ``~s`` what one worker computed for itself while it could not read the quarantine.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import NamedTuple

from blake3 import blake3

_FORM = re.compile(r"^([0-9a-f]{32})-([a-z0-9]{1,16})-([0-9a-f]{32})$")
_APART = re.compile(r"(?:~[qr][0-9a-f]{16})+$")
_ANY = re.compile(r"(?:~[qrs][0-9a-f]{16})+$")


class Salt(NamedTuple):
    tenant: str
    cls: str
    mac: str

    def __str__(self) -> str:
        return f"{self.tenant}-{self.cls}-{self.mac}"


def tenant_hash(name: str) -> str:
    return blake3(b"dynamo-blob.tenant\0" + name.encode()).hexdigest()[:32]


def compose(tenant: str, cls: str, key: bytes, client_salt: str) -> Salt:
    """The salt of one request. `key` is the tenant's secret salt key; rotating it makes old KV unreachable."""
    mac = hmac.new(key, client_salt.encode(), hashlib.sha256).hexdigest()[:32]
    return Salt(tenant_hash(tenant), cls, mac)


def parse(text: str | None) -> Salt | None:
    """The parts of a composed salt; None for no salt or a salt of another shape."""
    found = _FORM.match(text or "")
    return Salt(*found.groups()) if found else None


def plain(text: str) -> str:
    """A worker's salt without the suffixes of a quarantine. One with a private suffix stays as it is: nobody's."""
    return _APART.sub("", text)


def bare(text: str) -> str:
    """A worker's salt as the gateway sent it: without any suffix."""
    return _ANY.sub("", text)


def suffixed(text: str) -> bool:
    """Whether `text` is nothing but suffixes, or empty."""
    return not text or _ANY.fullmatch(text) is not None
