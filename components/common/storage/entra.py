"""Microsoft Entra tokens for Blob: workload identity on AKS, or any chain of azure-identity.

A token is renewed in the background at 2/3 of its life; callers meet a token request only when there
is no valid token. One token request at a time per process, however many threads ask.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from azure.core.credentials import AccessToken
from azure.core.exceptions import AzureError

from components.common.errors import DynamoBlobError, nearest
from components.common.storage.config import CredentialConfig
from components.common.storage.credentials import RENEW_AT, Credential
from components.common.storage.errors import StorageError, clean
from components.common.storage.shared_token import SharedToken

SCOPE = "https://storage.azure.com/.default"
API_VERSION = "2024-11-04"
_NAMES = {
    "default": "DefaultAzureCredential",
    "workload_identity": "WorkloadIdentityCredential",
    "managed_identity": "ManagedIdentityCredential",
    "environment": "EnvironmentCredential",
    "azure_cli": "AzureCliCredential",
    "azure_developer_cli": "AzureDeveloperCliCredential",
    "azure_powershell": "AzurePowerShellCredential",
}
_TAKES_CLIENT_ID = {"workload_identity", "managed_identity"}
_LIMITS: dict[str, Any] = {"retry_total": 2, "retry_backoff_factor": 0.3, "connection_timeout": 3, "read_timeout": 10}


def chain(config: CredentialConfig) -> Any:
    """azure-identity's credential for `config.chain`, in order; the default chain when empty."""
    import azure.identity as identity

    made = []
    for name in config.chain or ("default",):
        if name not in _NAMES:
            raise DynamoBlobError(
                "STORAGE-ROLE-UNKNOWN",
                f"there is no credential '{name}'",
                why=nearest(name, _NAMES),
                do="correct `chain`",
            )
        extra: dict[str, Any] = {} if name.startswith("azure_") else dict(_LIMITS)
        if name in _TAKES_CLIENT_ID and (client := config.client_id or os.environ.get("AZURE_CLIENT_ID", "")):
            extra["client_id"] = client
        if config.client_id and name == "default":
            extra |= {"managed_identity_client_id": config.client_id, "workload_identity_client_id": config.client_id}
        made.append(getattr(identity, _NAMES[name])(**extra))
    return made[0] if len(made) == 1 else identity.ChainedTokenCredential(*made)


class EntraCredential(Credential):
    """Bearer tokens. `make` builds the azure-identity credential (tests pass their own, and then share nothing)."""

    def __init__(self, config: CredentialConfig, make: Callable[[], Any] | None = None) -> None:
        who = config.client_id or os.environ.get("AZURE_CLIENT_ID", "")
        self.identity = f"entra:{who or '+'.join(config.chain) or 'default'}"
        self._shared = SharedToken(f"{config.client_id}|{config.chain}") if make is None else None
        self.requests = 0
        self._make = make or (lambda: chain(config))
        self._token: AccessToken | None = None
        self._renew_at = 0.0
        self._lock = threading.Lock()  # held while a token is requested
        self._renewing = False

    def token(self) -> AccessToken:
        """A token with life left. Raises STORAGE-NO-CREDENTIAL when the chain gives none."""
        now, token = time.time(), self._token
        if token and now < self._renew_at:
            return token
        if token and now < token.expires_on:
            self._renew_soon()
            return token
        with self._lock:
            if self._token and time.time() < self._token.expires_on:
                return self._token
            return self._request()

    def _renew_soon(self) -> None:
        if self._renewing:
            return
        self._renewing = True
        threading.Thread(target=self._renew, name="entra-renew", daemon=True).start()

    def _renew(self) -> None:
        try:
            with self._lock:
                self._request()
        except DynamoBlobError:
            self._renew_at = time.time() + 1.0  # the old token still works; try again soon
        finally:
            self._renewing = False

    def _request(self) -> AccessToken:
        """A new token: another process's, or asked for now. The one we hold will not do (too old, or refused)."""
        now = time.time()
        held = self._token.token if self._token else ""
        token = self._shared.get(self._ask, held) if self._shared is not None else self._ask()
        self._token, self._renew_at = token, now + (token.expires_on - now) * RENEW_AT
        return token

    def _ask(self) -> AccessToken:
        self.requests += 1
        try:  # a fresh object each time: azure-identity's own cache would hand out the old token until minutes before its end
            token: AccessToken = self._make().get_token(SCOPE)
        except (AzureError, ValueError, OSError) as e:
            raise StorageError(
                "STORAGE-NO-CREDENTIAL", "Microsoft Entra gave no token for storage", where=SCOPE,
                why=f"{clean(str(e)).splitlines()[0] if str(e) else type(e).__name__}; identity: {self.identity}",
                do="check that the client id (the graph's identities, or AZURE_CLIENT_ID) is an identity of this node or service account, and its federation; elsewhere set credential.chain", status=0,
            ) from None  # fmt: skip
        return token

    def refresh(self) -> bool:
        before = self._token
        with self._lock:
            if self._token is not before:
                return True  # another thread has just renewed it
            try:
                return self._request().token != (before.token if before else "")
            except DynamoBlobError:
                return False

    def sign(self, url: str) -> tuple[str, dict[str, str]]:
        if not url.startswith("https://"):
            raise StorageError(
                "STORAGE-TLS", "tokens are sent over https only", where=url.split("?")[0], why=f"identity: {self.identity}",
                do="use an https endpoint, or a SAS file", status=0,
            )  # fmt: skip
        return url, {"Authorization": f"Bearer {self.token().token}", "x-ms-version": API_VERSION}

    def sdk(self) -> Any:
        return _TokenAdaptor(self)


class _TokenAdaptor:
    """azure-core's TokenCredential over an EntraCredential."""

    def __init__(self, source: EntraCredential) -> None:
        self._source = source

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        return self._source.token()
