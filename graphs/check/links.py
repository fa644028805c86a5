"""What two ends of a link must agree on: a pair that disagrees starts, answers, and answers wrongly."""

from __future__ import annotations

from collections.abc import Iterator

from graphs.check.base import Context
from graphs.load import Finding

HASHES_STABLE = ("sha256", "sha256_cbor")


def engines_agree(c: Context) -> Iterator[Finding]:
    """Prefill writes KV that decode reads as its own."""
    if c.linked is None:
        return
    prefill, decode = c.linked
    same = {
        "block_size": (
            "CHECK-BLOCK-SIZE",
            "blocks are copied whole: a reader with other blocks takes KV of other tokens (vLLM #42895: accuracy 0.031, all healthy)",
        ),
        "dtype": ("CHECK-DTYPE", "KV bytes of one dtype read as another are noise"),
        "tensor_parallel_size": ("CHECK-PARALLEL", "each rank holds its own heads; other counts hold other heads"),
        "max_model_len": ("CHECK-MAX-LEN", "a prompt that one side takes the other refuses, after it was computed"),
    }
    for key, (code, why) in same.items():
        a, b = getattr(prefill.args, key), getattr(decode.args, key)
        if a != b:
            yield Finding(
                code,
                f"prefill and decode differ in {key}",
                c.engine_place(decode if key in decode.spec.engine else prefill, key),
                f"prefill {a}, decode {b}; {why}",
                f"give both one {key}: set it under engine.set",
            )
    for key in sorted({*prefill.args.extra, *decode.args.extra}):
        a, b = prefill.args.extra.get(key), decode.args.extra.get(key)
        if a != b and key in (
            "kv_cache_dtype",
            "quantization",
            "hf_overrides",
            "tokenizer",
            "tokenizer_mode",
            "revision",
            "rope_scaling",
            "sliding_window",
            "pipeline_parallel_size",
        ):
            yield Finding(
                "CHECK-EXTRA-DIFFERS",
                f"prefill and decode differ in extra.{key}",
                c.engine_place(decode if "extra" in decode.spec.engine else prefill, "extra"),
                f"prefill {a!r}, decode {b!r}; it changes the KV or the tokens",
                "set it under engine.set.extra for both",
            )


def weights_agree(c: Context) -> Iterator[Finding]:
    own = c.spec.model.version
    for worker in c.workers:
        if worker.spec.version and worker.spec.version != own:
            yield Finding(
                "CHECK-WEIGHTS-DIFFER",
                f"{worker.role} serves other weights than the graph",
                c.graph.place("components", worker.role, "version"),
                f"graph {own or 'follows its channel'}, {worker.role} {worker.spec.version}; KV of one set of weights means nothing to another",
                "serve a canary as a graph of its own",
            )


def hashes_agree(c: Context) -> Iterator[Finding]:
    """Router, tiers and every worker must name a prefix by the same hash."""
    for worker in c.workers:
        seed = worker.spec.env.get("PYTHONHASHSEED")
        if seed is not None and seed != c.spec.runtime.hash_seed:
            yield Finding(
                "CHECK-HASH-SEED",
                f"{worker.role} hashes with another seed",
                c.graph.place("components", worker.role, "env", "PYTHONHASHSEED"),
                f"graph {c.spec.runtime.hash_seed!r}, {worker.role} {seed!r}; the tiers would never hit across workers or restarts",
                "set runtime.hash_seed",
            )
        algorithm = worker.args.extra.get("prefix_caching_hash_algo")
        if algorithm is not None and algorithm not in HASHES_STABLE:
            yield Finding(
                "CHECK-HASH-ALGORITHM",
                f"the prefix hash '{algorithm}' is not stable",
                c.engine_place(worker, "extra"),
                "it depends on the process: keys in Blob would name other prefixes after a restart",
                "leave prefix_caching_hash_algo out (sha256_cbor)",
            )
        if worker.args.extra.get("enable_prefix_caching") is False:
            yield Finding(
                "CHECK-PREFIX-CACHE",
                "prefix caching is off",
                c.engine_place(worker, "extra"),
                "router and tiers index prefix blocks: there would be none",
                "leave enable_prefix_caching out",
            )


def router_agrees(c: Context) -> Iterator[Finding]:
    router = c.spec.components.router
    if router and router.block_size and any(router.block_size != w.args.block_size for w in c.workers):
        sizes = ", ".join(f"{w.role} {w.args.block_size}" for w in c.workers)
        yield Finding(
            "CHECK-ROUTER-BLOCK-SIZE",
            "the router counts other blocks than the workers",
            c.graph.place("components", "router", "block_size"),
            f"router {router.block_size}, {sizes}; its hashes would match nothing and every decision would be blind",
            "remove block_size: the plan fills it in",
        )


def pools_complete(c: Context) -> Iterator[Finding]:
    roles = {w.role for w in c.workers}
    if len(roles & {"prefill", "decode"}) == 1:
        have = next(iter(roles & {"prefill", "decode"}))
        missing = "decode" if have == "prefill" else "prefill"
        yield Finding(
            "CHECK-POOL-MISSING",
            f"{have} without {missing}",
            c.graph.place("components", have),
            "Dynamo never lists the model: every request gets 503 while all processes are healthy",
            f"add components.{missing}, or use components.aggregated",
        )
    if "aggregated" in roles and roles & {"prefill", "decode"}:
        yield Finding(
            "CHECK-POOLS-MIXED",
            "aggregated workers beside prefill and decode",
            c.graph.place("components", "aggregated"),
            "Dynamo splits requests between them by chance; the aggregated pool is no fallback (503 when prefill is gone)",
            "use one kind in a graph",
        )
    for worker in c.workers:
        if worker.spec.replicas == 0:
            yield Finding(
                "CHECK-POOL-EMPTY",
                f"{worker.role} has no replica",
                c.graph.place("components", worker.role, "replicas"),
                "the model would never become ready",
                "give it one replica, or leave the component out",
            )


def links_known(c: Context) -> Iterator[Finding]:
    known = {name for name in type(c.spec.components).model_fields if getattr(c.spec.components, name) is not None}
    for i, link in enumerate(c.spec.links):
        for end, key in ((link.source, "from"), (link.to, "to")):
            if end not in known:
                yield Finding(
                    "CHECK-LINK-UNKNOWN",
                    f"a link names '{end}', which the graph has not",
                    c.graph.place("links", i, key),
                    f"components: {', '.join(sorted(known))}",
                    "correct the name",
                )


RULES = (engines_agree, weights_agree, hashes_agree, router_agrees, pools_complete, links_known)
