"""Leftovers of killed engines go; what a live process has mapped stays."""

from __future__ import annotations

import mmap
import os
import uuid

from components.common.kv.shm import ROOT, sweep


def make(name: str, age_s: float) -> str:
    path = ROOT / name
    path.write_bytes(b"x" * 4096)
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    return name


def test_only_unmapped_old_leftovers_go() -> None:
    mark = uuid.uuid4().hex
    names = {k: f"vllm_offload_{mark}{k}.mmap" for k in ("dead", "mapped", "young")}
    other = f"notours-{mark}"
    try:
        for kind, age in (("dead", 600), ("mapped", 600), ("young", 0)):
            make(names[kind], age)
        make(other, 600)
        with open(ROOT / names["mapped"], "r+b") as f, mmap.mmap(f.fileno(), 4096):
            removed = sweep(60.0)
            assert names["dead"] in removed
            assert not {names["mapped"], names["young"], other} & set(removed)
            assert (ROOT / names["mapped"]).exists() and (ROOT / other).exists()
    finally:
        for name in [*names.values(), other]:
            (ROOT / name).unlink(missing_ok=True)
