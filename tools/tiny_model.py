"""Make the `tiny-*` models: two-layer random-weight models on the real engine with the real tokenizer.

    python -m tools.tiny_model LAYOUT OUTPUT_DIR [--sample DIR] [--seed N]

They serve fault matrices and volume, never a figure of speed. Same layout and seed, same bytes.
Layouts: full (attention over the whole context). Others follow with the KV tiers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def full(vocab: int) -> Any:
    """2-layer Llama, hidden 128, 4 heads of 32, 2 KV heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=True,
            bos_token_id=1, eos_token_id=2, rope_theta=100000.0,
        )
    )  # fmt: skip


LAYOUTS: dict[str, Callable[[int], Any]] = {"full": full}


def build(layout: str, output: Path, sample: Path, seed: int = 0) -> None:
    """Write the model directory `output` in one rename. `sample` is the sample model's directory (its tokenizer)."""
    if (output / "config.json").exists():
        return
    if not (sample / "tokenizer.json").exists():
        from tools.sample_model import build as build_sample

        build_sample(sample)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(seed)
    output.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        model = LAYOUTS[layout](len(AutoTokenizer.from_pretrained(sample)))
        for parameter in model.parameters():  # wide enough that greedy answers differ between prompts
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.08)
        model.to(torch.bfloat16).save_pretrained(work)
        for name in TOKENIZER_FILES:
            if (sample / name).exists():
                shutil.copyfile(sample / name, work / name)
        work.chmod(0o755)
        os.rename(work, output)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", choices=sorted(LAYOUTS))
    parser.add_argument("output", type=Path)
    parser.add_argument("--sample", type=Path, default=Path(".state/models/smollm2-135m-instruct"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    build(args.layout, args.output, args.sample, args.seed)


if __name__ == "__main__":
    sys.exit(main())
