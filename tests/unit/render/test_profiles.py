"""Profiles of the seeds' models: figures follow from the architecture, fit the machine, and say where they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.kv.config import MAX_CHUNK, MIN_CHUNK, KvTiersConfig
from graphs.check import check_graph
from graphs.profiles import CONFIGS, EngineProfile, read_engine_profile, read_kv_profile
from tests.golden import rendering

GPU = sorted(p.stem for p in (CONFIGS / "engine").glob("*-h[12]00.yaml"))
KV = sorted(p.stem for p in (CONFIGS / "kv").glob("*-h[12]00.yaml"))
MODELS = (
    "qwen3.5-27b", "nemotron-3-super-120b", "qwen3.5-122b", "kimi-k2.5", "gpt-oss-120b", "minimax-m2.7",
    "mistral-medium-3.5-128b",
)  # fmt: skip
HBM = {"ND96isr_H100_v5": 80e9, "ND96isr_H200_v5": 141e9}
RAM = {"ND96isr_H100_v5": 1900 * 2**30, "ND96isr_H200_v5": 1850 * 2**30}


def engine(name: str) -> EngineProfile:
    return read_engine_profile(name, "test")[0]


def test_every_model_has_a_profile_where_it_fits() -> None:
    expected = {f"{m}-{hw}" for m in MODELS for hw in ("h100", "h200")} - {"kimi-k2.5-h100"}  # 595 GB on 8 x 80 GB
    assert expected <= set(GPU)


@pytest.mark.parametrize("name", GPU)
def test_kv_bytes_follow_from_the_architecture(name: str) -> None:
    m = engine(name).model
    per_layer = m.latent_dim * 2 if m.layout == "mla" else m.kv_heads * m.head_dim * 2 * 2
    assert m.kv_bytes_per_token == m.kv_layers * per_layer > 0
    assert bool(m.state_bytes) == (m.layout == "linear+full")


@pytest.mark.parametrize("name", GPU)
def test_a_replica_fits_its_gpus_and_its_node(name: str) -> None:
    p = engine(name)
    weights, kv = p.model.weights_bytes / p.gpus, p.engine["kv_cache_bytes"]
    assert weights + kv <= 0.90 * HBM[p.hardware]
    assert p.engine["tensor_parallel_size"] == p.gpus <= 8
    one_request = p.engine["max_model_len"] * p.model.kv_bytes_per_token / p.gpus + p.model.state_bytes / p.gpus
    assert kv >= one_request, "one request of the longest context must fit"
    assert p.engine["max_model_len"] <= p.model.max_positions


@pytest.mark.parametrize("name", GPU)
def test_every_figure_has_a_source_or_says_estimate(name: str) -> None:
    m = engine(name).model
    assert len(m.source) > 20 and m.estimate is True and len(m.tiers_reason) > 20
    for path in (CONFIGS / "engine" / f"{name}.yaml", CONFIGS / "kv" / f"{name}.yaml"):
        if path.exists():
            assert "ot run here" in path.read_text()


def test_tiers_are_on_only_where_the_layout_is_served() -> None:
    for name in GPU:
        m = engine(name).model
        assert (m.tiers == "on") == (name in KV), name
        if m.layout == "mla":
            assert m.tiers == "refused"
    for graph in (rendering.ROOT / "graphs/aks").glob("*-h200.yaml"):
        refused = engine(graph.stem).model.tiers == "refused"
        uses = any(line.startswith("kv: ") for line in graph.read_text().splitlines())
        assert uses is not refused, graph.stem


@pytest.mark.parametrize("name", [n for n in KV if n in GPU])
def test_chunks_are_two_to_thirty_two_mib_and_the_tier_fits_the_node(name: str) -> None:
    p = engine(name)
    settings = KvTiersConfig.parse(read_kv_profile(name, "test")[0].settings)
    if p.model.layout != "linear+full":  # those: the engine sets the block itself
        tokens = settings.blocks_per_chunk * p.engine["block_size"]
        chunk = (
            tokens * p.model.kv_bytes_per_token
        )  # one row, one object: vLLM lays the pages of all ranks side by side
        assert MIN_CHUNK <= chunk <= MAX_CHUNK
        assert settings.staging_bytes == pytest.approx(64 * chunk, abs=2**20)
    replicas = 8 // p.gpus
    assert replicas * (settings.dram_bytes + settings.staging_bytes + p.host_bytes) < RAM[p.hardware] * 0.8


def test_no_profile_stands_alone(tmp_path: Path) -> None:
    """A KV profile without its engine profile would be sized for nothing."""
    assert [n for n in KV if n not in GPU and n != "qwen3-8b-h200"] == []


def test_check_agrees_with_the_profiles_of_every_shipped_graph() -> None:
    """The same arithmetic twice: a profile that `check` warns of is a profile to be mended."""
    for graph in (rendering.ROOT / "graphs/aks").glob("*-h200.yaml"):
        assert check_graph(graph) == [], graph.stem
