"""Who is calling, and what they may use: the tenants file kept up to date, limits per tenant."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from components.common.errors import DynamoBlobError
from components.common.messages.salt import compose
from components.common.messages.tenants import TenantsFile, stamp
from components.frontend.errors import Refusal

log = logging.getLogger("gateway")

CHECK_S = 1.0
"""Seconds between looks at the tenants file."""


@dataclass
class Caller:
    """One tenant as far as this gateway process knows it. Counters outlive reloads of the file."""

    name: str
    inflight: int = 0
    accepted: deque[float] = field(default_factory=deque)


class Tenants:
    """`None` as path = `auth: none`: every caller is the nameless tenant, salts stay the client's own.

    A file that became unreadable or invalid leaves the last good one in force (logged, counted); the first load
    must succeed. A tenant whose salt key cannot be read gets 503: an unsalted request would share KV.
    """

    def __init__(
        self,
        path: str | None,
        clock: Callable[[], float] = time.monotonic,
        beside: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """`beside` runs a reload; the gateway's is a thread, since a large file takes seconds."""
        self.path, self.clock, self._beside = path, clock, beside
        self._loading = False
        self.file: TenantsFile | None = None
        self.usable = 0
        """Tenants whose salt key could be read."""
        self.reloads, self.reload_errors = 0, 0
        self._stamp: object = None
        self._looked = 0.0
        self._by_key: dict[str, str] = {}
        self._salts: dict[str, bytes] = {}
        self.callers: dict[str, Caller] = {}
        if path is not None:
            self._load()
            self._looked = clock()

    def refresh(self) -> None:
        """Look at the file when the last look is old; cheap. The gateway also asks by a timer: a revoked key must not have
        one more request, however long nobody called."""
        if self.path is None or self._loading or self.clock() - self._looked < CHECK_S:
            return
        self._looked = self.clock()
        if stamp(self.path, self.file) != self._stamp:
            self._loading = True
            self._beside(self._reload)

    def _reload(self) -> None:
        assert self.path is not None
        seen = stamp(self.path, self.file)
        try:
            self._load()
            self.reloads += 1
        except Exception as e:  # whatever is wrong with a file must not reach callers who are in the last good one
            self._stamp = seen  # say it once per change
            self.reload_errors += 1
            log.error("tenants file not reloaded, the last good one stays in force: %s", e)
        finally:
            self._loading = False

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Raises Refusal(401)."""
        if self.path is None:
            return self._caller("")
        self.refresh()
        assert self.file is not None
        key = _presented(headers)
        if not key:
            raise Refusal(401, "missing_api_key", "no API key: send it as `Authorization: Bearer KEY`")
        name = self.file.tenant_of(key)
        if name is None:
            raise Refusal(401, "invalid_api_key", "this API key is not known here")
        return self._caller(name)

    def salt(self, caller: Caller, client_salt: str) -> str:
        """The cache salt of a request; "" for none. Raises Refusal(503) when the tenant's salt key is not usable."""
        if self.path is None:  # "~" begins what workers append for themselves (quarantine)
            return client_salt.replace("%", "%25").replace("~", "%7E") if "~" in client_salt else client_salt
        salts, file = self._salts, self.file  # in this order: a reload beside us sets the file first
        assert file is not None
        try:
            key = salts.get(caller.name) or salts.setdefault(caller.name, file.salt_key(caller.name))
        except DynamoBlobError as e:
            log.error("%s", e)
            raise Refusal(
                503, "tenant_unavailable", "this tenant cannot be served: its salt key is not usable", retry_after=30
            ) from None
        return str(compose(caller.name, file.class_of(caller.name), key, client_salt))

    def admit(self, caller: Caller) -> None:
        """Count a request in. Raises Refusal(429); pair with `leave`."""
        limits = self._limits(caller)
        if limits and limits.concurrent and caller.inflight >= limits.concurrent:
            raise Refusal(
                429,
                "concurrency_limit",
                f"{caller.inflight} requests in flight; this tenant may have {limits.concurrent}",
                retry_after=1,
            )
        if limits and limits.requests_per_minute:
            now, window = self.clock(), caller.accepted
            while window and now - window[0] >= 60:
                window.popleft()
            if len(window) >= limits.requests_per_minute:
                wait = 60 - (now - window[0])
                raise Refusal(
                    429, "rate_limit", f"{limits.requests_per_minute} requests per minute are used up", retry_after=wait
                )
            window.append(now)
        caller.inflight += 1

    def leave(self, caller: Caller) -> None:
        caller.inflight -= 1

    def body_limit(self, caller: Caller, own: int) -> int:
        limits = self._limits(caller)
        return min(own, limits.body_bytes) if limits and limits.body_bytes else own

    def _limits(self, caller: Caller):  # type: ignore[no-untyped-def]
        tenant = self.file.tenants.get(caller.name) if self.file else None
        return tenant.limits if tenant else None

    def _caller(self, name: str) -> Caller:
        return self.callers.get(name) or self.callers.setdefault(name, Caller(name))

    def _load(self) -> None:
        assert self.path is not None
        before = stamp(self.path)
        file = TenantsFile.load(self.path)
        if not file.tenants:
            raise DynamoBlobError(
                "GATEWAY-NO-TENANTS", "the tenants file names no tenant: nobody could call", where=self.path,
                do="add tenants; configs/tenants holds examples",
            )  # fmt: skip
        usable = 0
        for name in file.tenants:
            try:
                file.salt_key(name)
                usable += 1
            except DynamoBlobError as e:
                log.error("tenant %s cannot be served: %s", name, e)
        self.usable = usable
        seen = stamp(self.path, file)
        self.file = file
        self._salts = {}
        self._stamp = seen if seen[0] == before[0] else None
        for name in [n for n in list(self.callers) if n not in file.tenants]:
            if not self.callers[name].inflight:
                del self.callers[name]


def _presented(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip() or headers.get("api-key", "").strip()
