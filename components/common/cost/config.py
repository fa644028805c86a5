"""Configuration of the cost model: priors to start from and bounds to keep. Hardware profiles: configs/hardware/*.yaml."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from components.common.config import Config


class TierPrior(Config):
    """What is believed of a tier before anything was measured."""

    name: str = Field(description="tier: dram | blob | nvme")
    fixed_s: float = Field(
        gt=0, description="seconds from asking to the first byte, and what a load costs beyond its bytes"
    )
    bytes_per_s: float = Field(gt=0, description="bytes per second of one worker")
    spread: float = Field(1.0, gt=0, description="relative standard deviation of both numbers; 1.0 = little is known")
    via: str = Field("", description="tier that every byte passes on its way up; dram for blob")
    lanes: int = Field(
        1,
        ge=1,
        description="chunks read at the same time; fewer at once see a part of the rate only, so a look is as wide",
    )


class CurvePoint(Config):
    tokens: int = Field(gt=0, description="prompt length, nothing cached")
    seconds: float = Field(gt=0, description="prefill time of that prompt, alone in the engine")


class HardwareProfile(Config):
    """Prefill curve of one model shape on one kind of hardware."""

    name: str
    source: str = Field(description="where the numbers come from: how, when and on what they were measured")
    estimate: bool = Field(
        description="true = not measured on this hardware; decisions say so until the engine's own measurements replace it"
    )
    kv_bytes_per_token: int = Field(gt=0, description="bytes of KV per token over all layers")
    max_batched_tokens: int = Field(8192, gt=0, description="tokens per engine step of the measured engine")
    sequence_step_s: float = Field(0.0, ge=0, description="seconds that each decoding sequence adds to a step")
    curve: tuple[CurvePoint, ...] = Field(min_length=2, description="measured points, rising in tokens and seconds")
    estimated_from: int = Field(0, ge=0, description="points of this length and more are estimates; 0 = none is")

    @model_validator(mode="after")
    def _rising(self) -> Self:
        pairs = list(zip(self.curve, self.curve[1:], strict=False))
        if any(b.tokens <= a.tokens or b.seconds <= a.seconds for a, b in pairs):
            raise ValueError("curve must rise in tokens and in seconds")
        return self


class CostConfig(Config):
    """Load or recompute, for one engine."""

    hardware: HardwareProfile
    tiers: tuple[TierPrior, ...]
    chunk_tokens: int = Field(128, gt=0, description="tokens that are loaded together")
    mode: Literal["auto", "load", "recompute"] = Field(
        "auto", description="load and recompute do the same for every request: for comparison"
    )
    switch_gain: float = Field(
        0.03,
        ge=0,
        lt=0.05,
        description="gain from which the choice of a prompt's size class changes; smaller differences keep it: no oscillation at break-even",
    )
    probe_every: int = Field(
        6, gt=0, description="requests that may pass without a measurement of a tier that was declined"
    )
    probe_budget: float = Field(
        0.02,
        ge=0,
        le=0.2,
        description="seconds of background probes allowed per second served, and as many given away in requests to learn",
    )
    probe_bytes: int = Field(
        128 << 20, gt=0, description="bytes of one probe at most: enough to see the rate, not only the latency"
    )
    deadline_factor: float = Field(
        2.0, gt=1, description="a load may take this many times its predicted seconds before the rest is recomputed"
    )
    deadline_floor_s: float = Field(0.05, gt=0, description="no deadline below this: scheduling noise")
    overlap: bool = Field(False, description="compute from the front while chunks load from the back, where it wins")
    overlap_min_tokens: int = Field(4096, gt=0, description="no overlap below: at 2k tokens no gain was measured")
    overlap_step_tokens: int = Field(
        512, gt=0, description="tokens of an engine step at most while a tail loads: in one large step nothing overlaps"
    )
    overlap_min_gain: float = Field(
        0.15, ge=0, description="predicted relative gain over the better single way below which no overlap is planned"
    )
