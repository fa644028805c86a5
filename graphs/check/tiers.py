"""KV tiers: sizes, layouts and classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from components.common.errors import DynamoBlobError, nearest
from components.common.kv.config import MAX_CHUNK, MIN_CHUNK, KvTiersConfig
from components.common.messages.tenants import TenantsFile
from graphs.check.base import Context, kib
from graphs.load import Finding

UNPROVEN_LAYOUTS = ("mla",)


def settings(c: Context) -> Iterator[Finding]:
    for worker in c.workers:
        if worker.kv is None:
            continue
        process = next((p for p in c.plan.processes if p.component == worker.role), None)
        if process is None or process.config is None:
            continue
        try:
            KvTiersConfig.model_validate(process.config["kv"]["settings"])
        except ValidationError as e:
            for item in e.errors(include_url=False):
                key = str(item["loc"][0]) if item["loc"] else ""
                why = nearest(key, KvTiersConfig.model_fields) if item["type"] == "extra_forbidden" else item["msg"]
                what = (
                    f"unknown tier setting '{key}'"
                    if item["type"] == "extra_forbidden"
                    else f"wrong tier setting '{key}'"
                )
                yield Finding(
                    "CHECK-KV-SETTING",
                    what,
                    c.kv_place(worker, key),
                    why,
                    "see components/common/kv/config.py for names and units",
                )


def chunks(c: Context) -> Iterator[Finding]:
    """A chunk is one row of the DRAM tier and one object: the pages of all ranks, side by side."""
    for worker in c.workers:
        tiers, facts = c.tiers(worker), worker.profile.model
        if tiers is None or not facts.kv_bytes_per_token or facts.layout == "linear+full":
            continue  # hybrids: the engine sets the block itself, so that a page holds a recurrent state
        chunk = facts.kv_bytes_per_token * worker.args.block_size * tiers.blocks_per_chunk
        size = f"{worker.args.block_size} tokens x {tiers.blocks_per_chunk} blocks x {facts.kv_bytes_per_token} B = {kib(chunk)}"
        if not MIN_CHUNK <= chunk <= MAX_CHUNK and c.spec.engine.kind == "vllm":
            yield Finding(
                "CHECK-CHUNK-SIZE",
                f"{worker.role}: chunks of {kib(chunk)}",
                c.kv_place(worker, "blocks_per_chunk"),
                f"{size}; below {kib(MIN_CHUNK)} requests cost more than bytes, above {kib(MAX_CHUNK)} a partial hit is coarse",
                "choose blocks_per_chunk for 2 to 32 MiB",
                "warning",
            )
        if tiers.staging_bytes < 2 * chunk:
            yield Finding(
                "CHECK-STAGING",
                f"{worker.role}: staging holds no two chunks",
                c.kv_place(worker, "staging_bytes"),
                f"staging_bytes {kib(tiers.staging_bytes)}, {size}; loads would run one by one or not at all",
                f"set staging_bytes to {kib(8 * chunk)} or more",
            )
        most = worker.args.max_model_len * facts.kv_bytes_per_token
        if tiers.dram_bytes < most:
            yield Finding(
                "CHECK-DRAM-TIER",
                f"{worker.role}: the DRAM tier holds no whole prompt",
                c.kv_place(worker, "dram_bytes"),
                f"max_model_len {worker.args.max_model_len} tokens = {kib(most)}, dram_bytes {kib(tiers.dram_bytes)}; a long prefix could never be promoted",
                "enlarge dram_bytes or lower max_model_len",
            )


def layouts(c: Context) -> Iterator[Finding]:
    for worker in c.workers:
        if worker.kv is not None and worker.profile.model.layout in UNPROVEN_LAYOUTS:
            yield Finding(
                "KV-UNSUPPORTED-LAYOUT",
                f"KV tiers for the layout '{worker.profile.model.layout}'",
                c.kv_place(worker),
                "no proof that a stored chunk reads back as the same attention; wrong answers would look healthy",
                "leave `kv` out for this model",
            )


def unsafe(c: Context) -> Iterator[Finding]:
    for worker in c.workers:
        tiers = c.tiers(worker)
        if tiers is not None and tiers.unsafe_skip_proof:
            yield Finding(
                "CHECK-KV-UNSAFE",
                "unsafe_skip_proof is set",
                c.kv_place(worker, "unsafe_skip_proof"),
                "rows would be used without their digest: a damaged object changes answers",
                "remove it; it is for tests that prove the proof is needed",
            )


def agree(c: Context) -> Iterator[Finding]:
    """Workers that share a store must cut it into the same chunks, or they never hit each other's."""
    have = [(w, t) for w in c.workers if (t := c.tiers(w)) is not None]
    for without in [w for w in c.workers if w.kv is None and have]:
        yield Finding(
            "CHECK-KV-ONE-SIDED",
            f"{without.role} has no KV tiers",
            c.graph.place("components", without.role),
            "chunks of its answers are not stored: the next turn recomputes them",
            "put `kv` at the top of the graph",
            "warning",
        )
    for worker, tiers in have[1:]:
        first = have[0]
        a, b = first[1].blocks_per_chunk * first[0].args.block_size, tiers.blocks_per_chunk * worker.args.block_size
        if a != b:
            yield Finding(
                "CHECK-KV-CHUNKS-DIFFER",
                "workers cut KV into other chunks",
                c.kv_place(worker, "blocks_per_chunk"),
                f"{first[0].role} {a} tokens, {worker.role} {b} tokens: neither hits what the other stored",
                "give every worker one kv profile",
            )


def tenants(c: Context) -> Iterator[Finding]:
    front = c.spec.components.frontend
    where = c.graph.place("components", "frontend", "tenants_file")
    if front.auth == "keys" and not front.tenants_file:
        yield Finding(
            "CHECK-TENANTS-MISSING",
            "auth: keys without a tenants file",
            c.graph.place("components", "frontend", "auth"),
            "every request would get 401",
            "name components.frontend.tenants_file, or auth: none on loopback",
        )
    if not front.tenants_file:
        return
    path = Path(c.graph.document.name).parent / front.tenants_file
    try:
        file = TenantsFile.load(path)
    except DynamoBlobError as e:
        yield Finding("CHECK-TENANTS-FILE", e.what, where, e.why, e.do or "correct the file")
        return
    for name in file.tenants if not c.for_cluster else ():  # a cluster mounts them
        try:
            file.salt_key(name)
        except DynamoBlobError as e:
            yield Finding(
                "CHECK-SALT-KEY", f"tenant '{name}' has no usable salt key", e.where, f"{e.why}; each of its requests would get 503", e.do
            )  # fmt: skip
    for name, cls in file.classes.items():
        if cls.container == c.spec.storage.weights.container and c.spec.storage.kv.url == c.spec.storage.weights.url:
            yield Finding(
                "CHECK-CLASS-CONTAINER",
                f"class '{name}' keeps KV in the weights container",
                where,
                "sweeping and purging KV would meet releases",
                "name another container",
            )


RULES = (settings, chunks, layouts, unsafe, agree, tenants)
