"""The cells of the comparison: 3 engine curves x 5 store speeds x 9 lengths x 2 loads."""

from __future__ import annotations

from pathlib import Path

import yaml

from bench.sim.world import Engine, Store
from components.common.cost.config import CostConfig, HardwareProfile, TierPrior

ENGINES = ("h200-8b", "h200-32b", "cpu-smollm2")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 122880)
LOADS = (0.3, 0.8)
# GB/s around each engine's own break-even (prefill makes KV at that rate): slower, about as fast, faster.
SPEEDS = {
    "h200-8b": (1.0, 2.0, 3.0, 5.0, 10.0),
    "h200-32b": (1.0, 2.0, 3.0, 5.0, 10.0),
    "cpu-smollm2": (0.005, 0.01, 0.015, 0.03, 0.1),
}
PROFILES = Path(__file__).parents[2] / "configs" / "hardware"


def profile(name: str) -> HardwareProfile:
    path = PROFILES / f"{name}.yaml"
    return HardwareProfile.parse(yaml.safe_load(path.read_text()), where=str(path))


def engine(name: str) -> Engine:
    p = profile(name)
    return Engine(name, tuple(c.tokens for c in p.curve), tuple(c.seconds for c in p.curve), p.kv_bytes_per_token)


def store(gb_per_s: float, latency_s: float = 0.080) -> Store:
    return Store(gb_per_s * 1e9, latency_s)


def config(name: str, blob_gb_per_s: float | None = None) -> CostConfig:
    """The policy's configuration for an engine: its priors know the middle store speed, right only by luck."""
    speeds = SPEEDS[name]
    prior = (blob_gb_per_s or speeds[len(speeds) // 2]) * 1e9
    return CostConfig(
        hardware=profile(name), tiers=(TierPrior(name="blob", fixed_s=0.05, bytes_per_s=prior, spread=1.0),)
    )
