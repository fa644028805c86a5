"""Prompts: natural-looking token ids of exact length, different per seed from the first token on."""

from __future__ import annotations

import random


def ids(n: int, seed: int = 0, vocab: int = 30000) -> list[int]:
    """Words drawn with a Zipf-like bias, so that a real model is not out of its distribution altogether."""
    rng = random.Random(f"kv-{seed}")
    return [100 + int(vocab * rng.random() ** 3) % (vocab - 100) for _ in range(n)]
