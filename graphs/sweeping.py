"""The sweeper as a process of the plan: one beside every graph that keeps KV in Blob, unless switched off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.common.kv.sweeper_config import SweeperConfig
from graphs.plan import Port, Probe, Process

if TYPE_CHECKING:
    from graphs.compile import _Compiler

BYTES_PER_OBJECT = 300
"""Catalogue (82) and what one sweep copies of it to rank."""


def sweeper(c: _Compiler, i: int) -> Process:
    """Sweeper `i`: the serving identity's KV account only; it opens no weights."""
    spec, site = c.spec.components.sweeper, c.site
    port, host = site.port(c.spec, "sweeper", i), site.bind(c.spec)
    config = SweeperConfig(
        name=f"sweeper-{i}", account=site.account(c.spec, "kv", "serving"), container=c.spec.storage.kv.container,
        tenants_file=site.tenants_file(c.graph.document.name, c.spec.components.frontend.tenants_file),
        total_bytes=spec.total_bytes, sweep_s=spec.sweep_s, relist_s=spec.relist_s, capacity=spec.capacity,
        status_file=str(site.run / "reports" / f"sweeper-{i}.json"), listen=f"{host}:{port}",
    )  # fmt: skip
    embedded = site.embedded(c.spec)
    return c.process(
        "sweeper", i, spec, [site.python, "-m", "components.common.kv.sweeper"], config=config, env=c.env.python(),
        ports=(Port(name="system", number=port, host=host, purpose="/health, /metrics"),),
        probe=Probe(http=f"http://{host}:{port}/health", deadline_s=120), after=("azurite-0",) if embedded else (),
        identity="serving", secrets=c.credentials("serving", "kv"), talks_to=("azurite",) if embedded else (),
        memory_bytes=(192 << 20) + BYTES_PER_OBJECT * spec.capacity,
    )  # fmt: skip
