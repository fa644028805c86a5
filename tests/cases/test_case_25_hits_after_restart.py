"""Case 25 (vllm#53569): no hits after a restart, because of the hash seed. Here hash and seed are pinned and part of the namespace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from components.common.errors import DynamoBlobError
from components.common.kv.layouts import check_config
from tests.kvtools.fixtures import names, stored


def test_hash_algorithm_and_seed_separate_namespaces(make) -> None:
    mine = make().tier.namespaces[0]
    assert mine.hash_algorithm == "sha256_cbor"
    assert mine.model_copy(update={"hash_seed": "1"}).digest() != mine.digest()


def test_a_restart_hits(make) -> None:
    stored(make(), names(4))
    assert (again := make()).hit(again.request(chunks=names(4)), names(4)) == 4


def test_another_hash_is_refused_before_start() -> None:
    cache = SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo="xxhash")
    model = SimpleNamespace(architectures=["LlamaForCausalLM"], use_mla=False, is_hybrid=False, dtype="bfloat16")
    with pytest.raises(DynamoBlobError, match="KV-HASH"):
        check_config(SimpleNamespace(model_config=model, cache_config=cache), True)
