"""How a component reaches one Azure storage account."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.common.config import Config


class CredentialConfig(Config):
    """Where a component's credential comes from. No secret ever stands in a plan or graph.

    sas_file: JSON file (mode 0600) ``{"sas": "sv=...", "expires": <unix seconds>}``, rewritten in place
      (rename) by its issuer before it expires; readers renew at 2/3 of its life. The local form: `dynamo serve` issues it.
    entra: azure-identity's chain (workload identity on AKS). The cluster form.
    key_file: file (mode 0600) holding the account key. Only the issuer of SAS tokens (the local launcher) uses it.
    """

    kind: Literal["sas_file", "entra", "key_file"]
    path: str = Field("", description="absolute path for sas_file and key_file")
    client_id: str = Field("", description="user-assigned identity for entra; empty = the chain's default")
    chain: tuple[str, ...] = Field(
        (), description="entra: names of the credentials to try, in order; empty = default chain"
    )


class AccountConfig(Config):
    """One storage account as seen by one component."""

    url: str = Field(
        description="blob endpoint, e.g. http://127.0.0.1:10000/devstoreaccount1 or https://acct.blob.core.windows.net"
    )
    credential: CredentialConfig
    ca_bundle: str = Field("", description="PEM file for https endpoints with a private CA; empty = system store")
    retries: int = Field(
        2,
        ge=0,
        le=10,
        description="retries per request beyond the first try; bounded so that an outage shows in seconds",
    )
    connect_timeout_s: float = Field(3.0, gt=0, description="seconds to connect")
    read_timeout_s: float = Field(15.0, gt=0, description="seconds without a byte before a request counts as stalled")
