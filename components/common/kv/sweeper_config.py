"""Settings of one sweeper."""

from __future__ import annotations

from pydantic import Field

from components.common.config import Config
from components.common.storage.config import AccountConfig


class SweeperConfig(Config):
    name: str = Field("sweeper-0", description="process name")
    account: AccountConfig = Field(description="KV storage account, identity with delete rights")
    container: str = Field(description="the graph's KV container; holds _control/")
    tenants_file: str = Field("", description="absolute path of the tenants file; empty = one class `default`")
    total_bytes: int = Field(0, ge=0, description="bytes over all classes; 0 = the classes' own budgets only")
    sweep_s: float = Field(
        60.0, gt=0, description="seconds between sweeps; a budget is overrun by at most what is put in one"
    )
    relist_s: float = Field(
        900.0, gt=0, description="seconds between full listings; bounds how long an unseen object stays unseen"
    )
    lease_s: int = Field(30, ge=15, le=60, description="seconds until another sweeper may take over from a dead one")
    most_deletes: int = Field(
        20_000, gt=0, description="deletions of one sweep at most, so that a sweep ends and the lease is kept"
    )
    capacity: int = Field(2**20, gt=0, description="objects the catalogue holds; memory is 72 bytes each")
    journal_keep_s: float = Field(3600.0, gt=0, description="seconds a journal stays after it was read to its end")
    status_file: str = Field("", description="JSON file with the counters of the last sweep; empty = none")
    listen: str = Field("", description="host:port of /health, /live and /metrics; empty = none")
