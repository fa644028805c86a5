"""P3 for every cache layout the tiers accept, and the refusal of those they do not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from components.common.errors import DynamoBlobError
from components.common.kv.layouts import check_config, check_groups
from tests.kvtools import kv
from tests.kvtools.engines import MODELS, Driver, EngineError
from tests.kvtools.text import ids

slow = [pytest.mark.slow, pytest.mark.timeout(900)]

PROVEN = [
    ("full", "float32"),
    ("full", "bfloat16"),
    ("sliding", "float32"),
    ("sinks", "float32"),
    ("mamba", "bfloat16"),
    ("gdn", "bfloat16"),
]


def tiny(layout: str) -> str:
    from tools.tiny_model import build

    build(layout, MODELS / f"tiny-{layout}", MODELS / "smollm2-135m-instruct")
    return f"tiny-{layout}"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Driver(tmp_path_factory.mktemp("driver")) as driver:
        yield driver


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout,dtype", PROVEN)
def test_tier_hits_equal_hbm_hits(driver: Driver, tmp_path, layout: str, dtype: str) -> None:
    """DRAM and directory hits against an HBM hit at the same border, bit for bit; a damaged group is noticed."""
    n = 1288 if layout == "gdn" else 520
    settings = kv.settings(nvme_dir=str(tmp_path / "nvme"), dram_bytes=256 << 20, staging_bytes=64 << 20)
    prompt = ids(n, seed=1)
    with driver.engine("e", tiny(layout), **kv.engine_args(settings, dtype=dtype)) as engine:
        cold = engine.generate(prompt)
        hits = [engine.generate(prompt) for _ in range(3)]
        border, want = hits[-1]["cached"], hits[-1]
        assert border >= 384 and cold["tokens"] == want["tokens"] and kv.same(hits[-2], want)
        for dram in (False, True):
            for _ in range(3):  # a recurrent state is kept at borders where a chunk ended: the first hit may be shorter
                engine.forget(dram=dram)
                hit = engine.generate(prompt)
                if hit["cached"] == border:
                    break
            assert hit["cached"] == border and kv.same(hit, want), (
                "store" if dram else "dram",
                hit["cached"],
                kv.band(hit, want),
            )
        files = [p for p in (tmp_path / "nvme").rglob("*") if p.is_file() and len(p.name) == 64]
        assert files
        for path in files:  # negative control: other rows in valid frames, proof off
            data = path.read_bytes()
            path.write_bytes(data[: kv.HEADER_BYTES] + data[-4096:] + data[kv.HEADER_BYTES : -4096])
        with driver.engine(
            "n", tiny(layout), **kv.engine_args({**settings, "unsafe_skip_proof": True}, dtype=dtype)
        ) as other:
            bad = other.generate(prompt)
            assert bad["cached"] >= border and not kv.same(bad, want), "the comparison did not notice"
        engine.forget(dram=True)
        proven = engine.generate(prompt)
        assert proven["cached"] == 0 and proven["tokens"] == cold["tokens"], "with proof the damaged rows are misses"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout,dtype", [("latent", "float32"), ("mamba", "float32")])
def test_unproven_layouts_do_not_start(driver: Driver, tmp_path, layout: str, dtype: str) -> None:
    settings = kv.settings(nvme_dir=str(tmp_path / "nvme"))
    with pytest.raises(EngineError, match="KV-UNSUPPORTED-LAYOUT"):
        driver.engine("refused", tiny(layout), **kv.engine_args(settings, dtype=dtype))


def config(architecture: str = "LlamaForCausalLM", **more: object) -> SimpleNamespace:
    model = {"architectures": [architecture], "use_mla": False, "is_hybrid": False, "dtype": "torch.bfloat16"}
    cache = {"enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256_cbor"}
    model.update({k: v for k, v in more.items() if k in model})
    cache.update({k: v for k, v in more.items() if k in cache})
    return SimpleNamespace(
        model_config=SimpleNamespace(**model), cache_config=SimpleNamespace(**cache), speculative_config=None
    )


@pytest.mark.parametrize(
    "more,what",
    [
        ({"use_mla": True}, "MLA"),
        ({"enable_prefix_caching": False}, "prefix caching off"),
        ({"architecture": "JambaForCausalLM", "is_hybrid": True}, "recurrent layers"),
        ({"architecture": "FalconH1ForCausalLM", "is_hybrid": True, "dtype": "torch.float32"}, "float32"),
    ],
)
def test_refused_before_an_engine_exists(more: dict, what: str) -> None:
    with pytest.raises(DynamoBlobError, match=what) as found:
        check_config(config(**more), platform_is_cpu=True)
    assert found.value.code == "KV-UNSUPPORTED-LAYOUT"


@pytest.mark.parametrize("architecture,hybrid", [("LlamaForCausalLM", False), ("FalconH1ForCausalLM", True)])
def test_proven_configurations_pass(architecture: str, hybrid: bool) -> None:
    check_config(config(architecture, is_hybrid=hybrid), platform_is_cpu=True)


@pytest.mark.parametrize(
    "kind,refused",
    [
        ("FullAttentionSpec", False), ("SlidingWindowSpec", False), ("MLAAttentionSpec", True), ("ChunkedLocalAttentionSpec", True),
        ("SinkFullAttentionSpec", True), ("SlidingWindowMLASpec", True), ("CrossAttentionSpec", True), ("RSWASpec", True),
    ],
)  # fmt: skip
def test_groups_are_told_by_their_exact_type(kind: str, refused: bool) -> None:
    """MLAAttentionSpec is a FullAttentionSpec by inheritance: isinstance would let it through."""
    from vllm.v1 import kv_cache_interface

    spec = object.__new__(getattr(kv_cache_interface, kind))
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["l0"])
    check = lambda: check_groups(config(), SimpleNamespace(kv_cache_groups=[group]))  # noqa: E731
    if refused:
        with pytest.raises(DynamoBlobError, match=f"group 0: {kind}"):
            check()
    else:
        check()
