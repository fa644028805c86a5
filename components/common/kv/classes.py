"""Retention classes as the workers and the sweeper use them: where KV of a request may go, and when it is over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from components.common.errors import DynamoBlobError, nearest
from components.common.kv.config import KvTiersConfig
from components.common.messages.salt import parse
from components.common.messages.tenants import RetentionClass, TenantsFile


class Placement(NamedTuple):
    """Where chunks of one request go. `container` empty = nowhere: they stay in HBM and DRAM."""

    tenant: str
    cls: str
    container: str


class Classes:
    """The classes of a tenants file (or of one built-in class when there is no file).

    kv_container: the graph's KV container, used by classes that name none.
    """

    def __init__(self, classes: Mapping[str, RetentionClass], default: str, kv_container: str) -> None:
        if default not in classes:
            raise DynamoBlobError(
                "KV-UNKNOWN-CLASS", f"the default retention class '{default}' is not defined", why=nearest(default, classes),
                do="name it under `classes` of the tenants file",
            )  # fmt: skip
        self._classes, self.default, self.kv_container = dict(classes), default, kv_container

    @classmethod
    def of_file(cls, file: TenantsFile, kv_container: str) -> Classes:
        return cls(file.classes, file.default_class, kv_container)

    @classmethod
    def single(
        cls, kv_container: str, *, ttl_s: float = 86400, max_ttl_s: float = 604800, nbytes: int = 64 * 2**30
    ) -> Classes:
        """Without a tenants file: everything is kept as one class ``default``."""
        return cls({"default": RetentionClass(ttl_s=ttl_s, max_ttl_s=max_ttl_s, bytes=nbytes)}, "default", kv_container)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Classes) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def items(self) -> list[tuple[str, RetentionClass]]:
        return list(self._classes.items())

    def get(self, name: str) -> RetentionClass:
        """A class by name; a name not (or no longer) in the file is treated as the default class."""
        return self._classes[self.effective(name)]

    def effective(self, name: str) -> str:
        """The class whose TTL and budget rule objects of `name`: itself, or the default class, whose budget they share."""
        return name if name in self._classes else self.default

    def container(self, name: str) -> str:
        """Container of a class; empty for an ephemeral one."""
        found = self.get(name)
        return "" if found.ephemeral else found.container or self.kv_container

    def containers(self) -> dict[str, str]:
        """{class: container} of every class that leaves the machine."""
        return {name: self.container(name) for name in self._classes if not self._classes[name].ephemeral}

    def place(self, salt: str | None, public: str) -> Placement:
        """Placement of a request by its composed cache salt; `public` is the tenant of unsalted traffic.

        A salt of another shape is a tenant of nobody: its KV is not put (fail closed), for no tenant could purge it.
        """
        if not salt:
            return Placement(public, self.default, self.container(self.default))
        found = parse(salt)
        if found is None:
            return Placement("", self.default, "")
        return Placement(
            found.tenant,
            found.cls,
            self.container(found.cls) if found.cls in self._classes else self.container(self.default),
        )

    def expires_at(self, cls: str, created: float, last_hit: float) -> float:
        """Unix seconds at which an object is over: extended by hits, capped by max_ttl_s."""
        c = self.get(cls)
        return min(max(last_hit, created) + c.ttl_s, created + c.max_ttl_s)

    def lifecycle(self, least_days: int = 1) -> dict[str, object]:
        """Azure lifecycle management policy as the backstop for a sweeper that does not run (its grain is a day).

        Classes that share a container share its rules, with the longest `max_ttl_s`: the service would apply the
        shortest. Prefixes are the first digits of tenants, so nothing under ``_control/`` ever matches; a rule may
        have ten of them at most, so a container takes two rules.
        """
        seconds: dict[str, float] = {}
        for name, container in self.containers().items():
            seconds[container] = max(seconds.get(container, 0.0), self.get(name).max_ttl_s)
        rules = []
        for container, longest in sorted(seconds.items()):
            days = max(least_days, math.ceil(longest / 86400) + 1)
            for part in ("01234567", "89abcdef"):
                rules.append({
                    "enabled": True, "name": f"{container}-{part[0]}-backstop", "type": "Lifecycle",
                    "definition": {
                        "filters": {"blobTypes": ["blockBlob"], "prefixMatch": [f"{container}/{digit}" for digit in part]},
                        "actions": {"baseBlob": {"delete": {"daysAfterModificationGreaterThan": days}}},
                    },
                })  # fmt: skip
        return {"rules": rules}


def classes_of(config: KvTiersConfig) -> Classes:
    """The classes a worker is configured with."""
    if config.tenants_file:
        return Classes.of_file(TenantsFile.load(config.tenants_file), config.container)
    return Classes.single(config.container)


def home_of(config: KvTiersConfig) -> str:
    """The container with ``_control/``."""
    return config.container or sorted(set(classes_of(config).containers().values()))[0]
