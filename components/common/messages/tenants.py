"""The tenants file: who may call, under which salt key, and what their KV is worth keeping.

One YAML, read by the gateway (keys, salt keys, limits), by workers and the sweeper (classes) and by
`dynamo purge`. It holds no secret: API keys as SHA-256, salt keys as paths of files with mode 0600.

    tenants:
      acme:
        keys: [<sha256 hex of an API key>]
        salt_key_file: secrets/acme.salt        # relative to this file
        class: standard
        limits: {concurrent: 16, requests_per_minute: 600, body_bytes: 8MiB}
    classes:
      standard: {ttl_s: 86400, max_ttl_s: 604800, bytes: 64GiB, container: kv-standard}
    default_class: standard                     # tenants that name none, and traffic without a tenant

Readers reload when `stamp()` of the file changes; a file that became invalid leaves the last good one in force.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from components.common.config import Config
from components.common.errors import DynamoBlobError, nearest
from components.common.messages.salt import tenant_hash
from components.common.places import places

_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")
_CLASS = re.compile(r"^[a-z0-9]{1,16}$")
_CONTAINER = re.compile(r"^[a-z0-9](?:[a-z0-9]|-(?!-)){1,61}[a-z0-9]$")
_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_LEAST_KEY_BYTES = 16
_NO_YAML = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What the parser raises: its constructors trip over explicit tags (``!!bool maybe``), dates, keys that are lists."""


def _bytes(value: Any) -> Any:
    if isinstance(value, str):
        found = _SIZE.match(value)
        if not found or found[2] not in _UNITS:
            raise ValueError("a size is a number of bytes or a string like 64GiB")
        size = float(found[1]) * _UNITS[found[2]]
        if not math.isfinite(size):
            raise ValueError("a size is a finite number of bytes")
        return int(size)
    return value


def _class_name(value: str) -> str:
    if not _CLASS.match(value):
        raise ValueError("a class name is 1 to 16 of a-z and 0-9: it travels inside the cache salt")
    return value


Size = Annotated[int, BeforeValidator(_bytes), Field(ge=0)]
ClassName = Annotated[str, AfterValidator(_class_name)]


class Limits(Config):
    """What one tenant may use of the gateway. 0 = the gateway's own bound only."""

    concurrent: int = Field(0, ge=0, description="requests in flight")
    requests_per_minute: int = Field(0, ge=0, description="requests accepted in any 60 s")
    body_bytes: Size = Field(0, description="bytes of one request body")


class Tenant(Config):
    model_config = ConfigDict(populate_by_name=True)

    keys: tuple[str, ...] = Field(min_length=1, description="SHA-256 (hex) of each API key; several during a rotation")
    salt_key_file: str = Field(
        min_length=1, description="file, mode 0600, with the salt key (16 bytes or more); relative to the tenants file"
    )
    cls: ClassName | None = Field(None, alias="class", description="retention class; absent = default_class")
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _hashed(self) -> Self:
        if not all(_SHA256.match(k) for k in self.keys):
            raise ValueError("keys are SHA-256 digests in lower-case hex, never API keys: printf %s KEY | sha256sum")
        return self


class RetentionClass(Config):
    """How long and how much KV of one class stays in Blob."""

    ttl_s: float = Field(gt=0, allow_inf_nan=False, description="seconds an object lives after its put or its last hit")
    max_ttl_s: float = Field(
        gt=0, allow_inf_nan=False, description="seconds an object lives at most, however often it is hit"
    )
    bytes: Size = Field(description="bytes in Blob over all tenants of the class; beyond it the least worth goes first")
    ephemeral: bool = Field(False, description="true: KV of this class never leaves HBM and DRAM")
    container: str = Field("", description="container of the class; empty = the graph's KV container")

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.max_ttl_s < self.ttl_s:
            raise ValueError(f"max_ttl_s {self.max_ttl_s:g} is shorter than ttl_s {self.ttl_s:g}")
        if self.container and not _CONTAINER.match(self.container):
            raise ValueError("a container name is 3 to 63 of a-z, 0-9 and single dashes")
        return self


class TenantsFile(Config):
    """The whole file. `directory` is where it was read from: base of relative paths."""

    tenants: dict[str, Tenant] = Field(default_factory=dict)
    classes: dict[ClassName, RetentionClass] = Field(min_length=1)
    default_class: ClassName = Field(description="class of tenants that name none and of traffic without a tenant")
    directory: str = Field("", description="set by the reader")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for where, cls in [
            ("default_class", self.default_class),
            *((f"tenants.{n}.class", t.cls) for n, t in self.tenants.items() if t.cls),
        ]:
            if cls not in self.classes:
                raise ValueError(f"{where}: no class '{cls}' ({nearest(cls, self.classes)})")
        owner: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for key in tenant.keys:
                if owner.setdefault(key, name) != name:
                    raise ValueError(f"tenants '{owner[key]}' and '{name}' share an API key: they would be one tenant")
        return self

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Raises TENANTS-UNREADABLE or CONFIG-INVALID."""
        path = Path(path)
        try:
            text = path.read_text()
            _check_flow_depth(text)
            raw = yaml.load(text, _Loader)
        except (OSError, *_NO_YAML) as e:
            raise DynamoBlobError(
                "TENANTS-UNREADABLE",
                "the tenants file cannot be read",
                where=str(path),
                why=" ".join(str(e).replace('"<unicode string>", ', "").split()),
                do="correct the file; configs/tenants holds examples",
            ) from None
        if not isinstance(raw, dict):
            raw = {}
        return cls.parse({**raw, "directory": str(path.parent.absolute())}, str(path), places(text))

    def class_of(self, tenant: str) -> str:
        """Class of a tenant's name; the default class for names the file does not know."""
        found = self.tenants.get(tenant)
        return found.cls if found and found.cls else self.default_class

    def by_hash(self) -> dict[str, str]:
        """{tenant hash (32 hex, as in salts and object names): tenant name}."""
        return {tenant_hash(name): name for name in self.tenants}

    def by_key(self) -> dict[str, str]:
        """{SHA-256 hex of an API key: tenant name}."""
        return {key: name for name, t in self.tenants.items() for key in t.keys}

    def tenant_of(self, api_key: str) -> str | None:
        """Tenant of a presented API key. Every entry is compared, so that timing tells nothing."""
        digest, found = hashlib.sha256(api_key.encode("utf-8", "surrogateescape")).hexdigest(), None
        for key, name in self.by_key().items():
            if hmac.compare_digest(key, digest):
                found = name
        return found

    def salt_key_path(self, tenant: str) -> Path:
        return Path(self.directory) / self.tenants[tenant].salt_key_file

    def salt_key(self, tenant: str) -> bytes:
        """The tenant's salt key. Raises TENANTS-SALT-KEY for a file absent, short or readable by others."""
        return read_salt_key(self.salt_key_path(tenant))


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """YAML's last of two equal keys wins silently; here it is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' stands here twice", key.start_mark)
            if isinstance(key.value, str):
                seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


def _check_flow_depth(text: str) -> None:
    """The parser needs minutes for what nobody writes."""
    depth = 0
    for mark in re.findall(r"[\[{\]}]", text):
        depth += 1 if mark in "[{" else -1
        if depth > 64:
            raise ValueError("nested deeper than 64 levels")


def read_salt_key(path: Path) -> bytes:
    try:
        found, key = path.stat(), path.read_bytes().strip()
    except (OSError, ValueError) as e:  # ValueError: a path no system has
        raise _bad_key(path, str(getattr(e, "strerror", "") or e)) from None
    mode = stat.S_IMODE(found.st_mode)
    # The kubelet mounts a Secret as root's, readable by the pod's own group and written by nobody.
    secret = mode == 0o440 and found.st_uid == 0 and found.st_gid in (os.getegid(), *os.getgroups())
    if mode & 0o077 and not secret:
        raise _bad_key(path, f"mode {mode:04o} lets others read it")
    if len(key) < _LEAST_KEY_BYTES:
        raise _bad_key(path, f"{len(key)} bytes; at least {_LEAST_KEY_BYTES} are needed")
    return key


def rotate_salt_key(path: Path) -> None:
    """Replace (or create) a salt key by a fresh random one: all KV under the old one becomes unreachable at every tier."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(handle, os.urandom(32).hex().encode())
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(temporary, path)


def can_rotate(path: Path) -> None:
    """Whether `rotate_salt_key` could replace this key; changes nothing. Raises TENANTS-SALT-KEY-FIXED."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        os.unlink(temporary)
    except (OSError, ValueError) as e:  # ValueError: a path no system has
        raise DynamoBlobError(
            "TENANTS-SALT-KEY-FIXED", "the tenant's salt key cannot be replaced from here", where=str(path),
            why=f"{getattr(e, 'strerror', '') or e}: a mounted Secret is read-only",
            do="replace the key where it is kept (kubectl create secret … | kubectl apply -f -), wait until the gateway has it, then purge with --keep-key",
        ) from None  # fmt: skip


def stamp(path: Path | str, known: TenantsFile | None = None) -> tuple[tuple[str, int, int, int, int], ...]:
    """Changes when the file or a salt key file it names changes, its mode included; a file absent counts as zeros."""
    paths = [Path(path)]
    if known is not None:
        paths += [known.salt_key_path(name) for name in sorted(known.tenants)]
    out = []
    for one in paths:
        try:
            s = one.stat()
            out.append((str(one), s.st_mtime_ns, s.st_size, s.st_ino, s.st_mode))
        except (OSError, ValueError):
            out.append((str(one), 0, 0, 0, 0))
    return tuple(out)


def _bad_key(path: Path, why: str) -> DynamoBlobError:
    return DynamoBlobError(
        "TENANTS-SALT-KEY",
        "a tenant's salt key cannot be used",
        where=str(path),
        why=why,
        do="a new key: openssl rand -hex 32 into a file of mode 600; a key in use is never replaced for its mode: chmod 600",
    )
