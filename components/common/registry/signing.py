"""Ed25519 keys and signed documents.

A signed document is canonical JSON with the fields ``key`` (public key, hex) and ``signature`` (hex),
the signature covering the canonical JSON of everything else, its ``format`` included, so that no
signature of one kind of document fits another. Bytes that are not canonical are refused: two byte
strings never mean the same document.

A private key comes from a file (mode 0600, PEM PKCS#8 or 64 hex digits) or from an environment
variable that holds the same; never from argv.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from blake3 import blake3
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from components.common.errors import DynamoBlobError
from components.common.registry.manifest import canonical_json
from components.common.storage.sas import read_secret, write_secret

_HEX64 = re.compile(r"[0-9a-f]{64}")
_HEX128 = re.compile(r"[0-9a-f]{128}")


class SigningKey:
    """A private key; `public` is its public half, hex."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        raw = private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.public = raw.hex()

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def open(cls, path: str | Path = "", env: str = "") -> SigningKey:
        """The key in the file `path`, else in the environment variable `env`. Raises REGISTRY-KEY."""
        text, where = ("", "")
        if path:
            text, where = read_secret(path), str(path)
        elif env:
            text, where = os.environ.get(env, ""), f"${env}"
        if not text:
            raise DynamoBlobError(
                "REGISTRY-KEY", "there is no signing key", where=where or "no file and no variable named",
                do="make one with `dynamo release keygen FILE`, or set the variable",
            )  # fmt: skip
        try:
            if _HEX64.fullmatch(text):
                return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text)))
            key = serialization.load_pem_private_key(text.encode(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as e:
            raise DynamoBlobError("REGISTRY-KEY", "the signing key cannot be read", where=where, why=type(e).__name__, do="give an Ed25519 key in PEM (PKCS#8) or 64 hex digits") from None  # fmt: skip
        if not isinstance(key, Ed25519PrivateKey):
            raise DynamoBlobError(
                "REGISTRY-KEY",
                "the signing key is not an Ed25519 key",
                where=where,
                do="make one with `dynamo release keygen FILE`",
            )
        return cls(key)

    def write(self, path: Path) -> None:
        """Store as PEM with mode 0600. Raises REGISTRY-KEY if the file exists: a key is never overwritten."""
        if path.exists():
            raise DynamoBlobError("REGISTRY-KEY", "the key file exists", where=str(path), do="choose another name")
        pem = self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_secret(path, pem.decode())

    def sign(self, document: dict[str, Any]) -> bytes:
        """Canonical bytes of `document` with ``key`` and ``signature`` added."""
        body = document | {"key": self.public}
        return canonical_json(body | {"signature": self._private.sign(canonical_json(body)).hex()})


def unsigned(document: dict[str, Any]) -> bytes:
    """Canonical bytes of a document nobody vouches for: empty ``key`` and ``signature``."""
    return canonical_json(document | {"key": "", "signature": ""})


def parse(data: bytes, *, code: str, what: str, where: str) -> dict[str, Any]:
    """The JSON object in `data` if its bytes are canonical; raises `code` otherwise."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict):
            raise ValueError("not an object")
        if canonical_json(document) != data:
            raise ValueError("not canonical JSON")
    except (ValueError, RecursionError) as e:
        raise DynamoBlobError(
            code, f"{what} is damaged", where=where, why=str(e)[:200], do="restore it from a backup or publish anew"
        ) from None
    return document


def verify(document: dict[str, Any], accepted: tuple[str, ...], *, kind: str, what: str, where: str) -> str:
    """The key that signed `document`. Raises, in this order,

    REGISTRY-<kind>-UNSIGNED         there is no signature
    REGISTRY-<kind>-UNKNOWN-KEY      signed by a key that is not accepted
    REGISTRY-<kind>-BAD-SIGNATURE    the signature does not fit the document
    """
    key, signature = document.get("key"), document.get("signature")
    if not key or not signature:
        raise DynamoBlobError(
            f"REGISTRY-{kind}-UNSIGNED",
            f"{what} is not signed",
            where=where,
            do="sign it with an accepted key, or lower `trust.require` for an experiment",
        )
    if key not in accepted:
        raise DynamoBlobError(
            f"REGISTRY-{kind}-UNKNOWN-KEY", f"{what} is signed by a key that is not accepted here", where=where,
            why=f"key {str(key)[:16]}…, accepted: {', '.join(k[:16] + '…' for k in accepted) or 'none'}",
            do="add the key to `trust` if you trust its owner",
        )  # fmt: skip
    body = {k: v for k, v in document.items() if k != "signature"}
    try:
        if (
            not isinstance(key, str)
            or not _HEX64.fullmatch(key)
            or not isinstance(signature, str)
            or not _HEX128.fullmatch(signature)
        ):
            raise ValueError("malformed")
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), canonical_json(body))
    except (InvalidSignature, ValueError):
        raise DynamoBlobError(
            f"REGISTRY-{kind}-BAD-SIGNATURE", f"the signature of {what} does not fit its content", where=where,
            why=f"key {key[:16]}…", do="someone changed it after it was signed: restore or publish anew",
        ) from None  # fmt: skip
    return key


def digest(data: bytes) -> str:
    return blake3(data).hexdigest()
