"""Proof of a purge by a process that knows nothing: no index, no cache, its own connections.

``python -m components.common.kv.probe --plan FILE`` (FILE = JSON of `ProbeConfig`) lists the tenant's prefix in
every container, asks for sampled deleted names one by one, and prints one JSON object. Exit 0 = nothing is left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from typing import Any

from pydantic import Field

from components.common.config import Config
from components.common.errors import DynamoBlobError
from components.common.kv.containers import known
from components.common.kv.epochs import generation_of
from components.common.kv.store import KvStore
from components.common.storage.account import Account
from components.common.storage.config import AccountConfig

_HEX32 = re.compile(r"^[0-9a-f]{32}$")
_SHOWN = 10


class ProbeConfig(Config):
    account: AccountConfig
    control: str = Field(description="container with _control/")
    containers: tuple[str, ...] = Field(description="containers to look in")
    tenant: str = Field(description="tenant, 32 hex")
    generation: int = Field(0, ge=0, description="generation from which objects may be there")
    modified_before: float = Field(
        0.0, ge=0, description="Unix seconds: only objects written at or before count; 0 = all of older generations"
    )
    absent: tuple[tuple[str, str], ...] = Field(
        (), description="(container, name) of sampled deleted objects, asked for singly"
    )


def is_old(name: str, modified: float, generation: int, newest: int, modified_before: float) -> bool:
    """Whether an object under the tenant's prefix falls under the purge.

    By age (`modified_before` > 0), or by generation: kept are `generation` (the purge's) to `newest` (read before
    listing). What carries no generation, or one never given, belongs to the tenant all the same and goes.
    """
    if modified_before > 0:
        return modified <= modified_before
    part = name.split("/")[1] if name.count("/") else ""
    return not _HEX32.match(part) or not generation <= generation_of(part) <= newest


def probe(config: ProbeConfig) -> dict[str, Any]:
    """{old, newer, listed, asked, still_there, examples, generation_read, ...}; `clean` is the verdict."""
    account = Account(config.account)
    store = KvStore(account, config.control, threads=1)
    try:
        old = newer = 0
        examples: list[str] = []
        generation = store.read_epochs().get(config.tenant, 0)
        containers = tuple(dict.fromkeys((*config.containers, *known(store))))
        for container in containers:
            for info in store.list(container, f"{config.tenant}/"):
                if is_old(info.name, info.modified, config.generation, generation, config.modified_before):
                    old += 1
                    examples += [f"{container}/{info.name}"] if len(examples) < _SHOWN else []
                else:
                    newer += 1
        again = [(c, n, account.find(c, n)) for c, n in config.absent]
        there = [  # by age: what was computed anew since has its old name, and is young
            f"{c}/{n}" for c, n, found in again
            if found is not None and (config.modified_before <= 0 or found.modified <= config.modified_before)
        ]  # fmt: skip
        return {
            "pid": os.getpid(), "at": time.time(), "containers": list(containers), "old": old, "newer": newer,
            "asked": len(config.absent), "still_there": there[:_SHOWN], "examples": examples, "generation": generation,
            "clean": old == 0 and not there and generation >= config.generation,
        }  # fmt: skip
    finally:
        store.close()
        account.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m components.common.kv.probe", description="Proves a purge")
    parser.add_argument("--plan", required=True, help="JSON of ProbeConfig")
    args = parser.parse_args(argv)
    try:
        found = probe(ProbeConfig.read(args.plan))
    except DynamoBlobError as e:
        print(json.dumps({"clean": False, "error": e.as_json()}))
        return 1
    print(json.dumps(found))
    return 0 if found["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
