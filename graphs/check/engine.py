"""What an engine can do with its settings, the model's facts and its hardware."""

from __future__ import annotations

from collections.abc import Iterator

from graphs.check.base import Context, kib
from graphs.load import Finding

CPU_BLOCK = 32
OWNED = (
    "model",
    "load_format",
    "model_loader_extra_config",
    "kv_transfer_config",
    "kv_events_config",
    "served_model_name",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory_bytes",
    "tensor_parallel_size",
    "enforce_eager",
    "seed",
    "tokenizer",
    "download_dir",
)


def blocks(c: Context) -> Iterator[Finding]:
    for worker in c.workers:
        size = worker.args.block_size
        if worker.profile.platform == "cpu" and c.spec.engine.kind == "vllm" and size % CPU_BLOCK:
            yield Finding(
                "CHECK-BLOCK-ALIGN",
                f"{worker.role}: blocks of {size} tokens",
                c.engine_place(worker, "block_size"),
                f"attention of the CPU build needs a multiple of {CPU_BLOCK}; the engine would refuse to start",
                "use 32, 64 or 128",
            )


def lengths(c: Context) -> Iterator[Finding]:
    for worker in c.workers:
        facts, args = worker.profile.model, worker.args
        if facts.max_positions and args.max_model_len > facts.max_positions:
            yield Finding(
                "CHECK-MAX-LEN-MODEL",
                f"{worker.role} takes longer prompts than the model knows",
                c.engine_place(worker, "max_model_len"),
                f"max_model_len {args.max_model_len}, the model was made for {facts.max_positions}; answers beyond it are noise",
                f"set max_model_len to {facts.max_positions} or less",
            )
        need = args.max_model_len * facts.kv_bytes_per_token
        if need > args.kv_cache_bytes * max(1, args.tensor_parallel_size):
            yield Finding(
                "CHECK-KV-CAPACITY",
                f"{worker.role} cannot hold one prompt of max_model_len",
                c.engine_place(worker, "kv_cache_bytes"),
                f"{args.max_model_len} tokens x {facts.kv_bytes_per_token} B = {kib(need)}, kv_cache_bytes {kib(args.kv_cache_bytes)}; such a request would never be scheduled",
                "enlarge kv_cache_bytes or lower max_model_len",
            )


def devices(c: Context) -> Iterator[Finding]:
    for worker in c.workers:
        want = (
            0
            if worker.profile.platform == "cpu"
            else worker.args.tensor_parallel_size * int(worker.args.extra.get("pipeline_parallel_size", 1))
        )
        if worker.spec.gpus != want and c.spec.engine.kind == "vllm":
            yield Finding(
                "CHECK-GPUS",
                f"{worker.role} is given {worker.spec.gpus} GPUs and needs {want}",
                c.graph.place("components", worker.role, "gpus"),
                f"profile {worker.profile.profile} ({worker.profile.platform}), tensor parallel {worker.args.tensor_parallel_size}",
                f"set components.{worker.role}.gpus: {want}",
            )


def owned(c: Context) -> Iterator[Finding]:
    for worker in c.workers:
        for key in worker.args.extra:
            if key in OWNED:
                yield Finding(
                    "CHECK-ENGINE-OWNED",
                    f"extra.{key} belongs to the plan",
                    c.engine_place(worker, "extra"),
                    "set behind the plan's back, checks and renderers would not see it",
                    "use the named setting, or leave it out",
                    "warning" if c.spec.engine.allow_unverified else "error",
                )


def loader(c: Context) -> Iterator[Finding]:
    engine = c.spec.engine
    if engine.loader != "dynamo_blob" and not engine.allow_unverified:
        yield Finding(
            "CHECK-UNVERIFIED-LOADER",
            f"the loader '{engine.loader}' does not verify weights",
            c.graph.place("engine", "loader"),
            "a flipped bit would be served",
            "use dynamo_blob, or say engine.allow_unverified: true",
        )


def mock(c: Context) -> Iterator[Finding]:
    engine = c.spec.engine
    if engine.kind == "mock" and c.spec.cluster is not None:
        yield Finding(
            "CHECK-MOCK-CLUSTER",
            "a fake engine in a cluster",
            c.graph.place("engine", "kind"),
            "no model would run there",
            "set engine.kind: vllm",
        )
    if engine.kind == "vllm" and engine.mock_token_ms:
        yield Finding(
            "CHECK-MOCK-SETTING",
            "mock_token_ms has no effect",
            c.graph.place("engine", "mock_token_ms"),
            "engine.kind is vllm",
            "remove it",
            "warning",
        )
    if engine.kind == "vllm" and c.workers and c.workers[0].profile.profile == "mock":
        yield Finding(
            "CHECK-MOCK-PROFILE",
            "a real engine with the profile of the fake one",
            c.graph.place("engine", "profile"),
            "its figures are invented",
            "name the model's profile",
        )


RULES = (blocks, lengths, devices, owned, loader, mock)
