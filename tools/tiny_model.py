"""Make the `tiny-*` models: two-layer random-weight models on the real engine with the real tokenizer.

    python -m tools.tiny_model LAYOUT OUTPUT_DIR [--sample DIR] [--seed N]

They serve fault matrices and volume, never a figure of speed. Same layout and seed, same bytes.
Layouts: full, sliding, sinks, mamba, gdn, latent (see the functions).
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


def sliding(vocab: int) -> Any:
    """4-layer Gemma 3: two layers see 256 tokens, two see all; both kinds overlay the same cache bytes."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, sliding_window=256, query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention"] * 2, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def sinks(vocab: int) -> Any:
    """2-layer gpt-oss: a window of 128 with attention sinks beside full attention, 4 experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, sliding_window=128, num_local_experts=4,
            num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"], bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        )
    )  # fmt: skip


def mamba(vocab: int) -> Any:
    """2-layer Falcon-H1: Mamba2 and attention in every layer (bf16 only on CPU)."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    return FalconH1ForCausalLM(
        FalconH1Config(
            vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32,
            mamba_d_state=32, mamba_n_groups=1, mamba_chunk_size=64, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def gdn(vocab: int) -> Any:
    """4-layer Qwen3-Next: three gated delta nets and one attention layer, 4 experts; its block is 640 tokens."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, linear_key_head_dim=128,
            linear_value_head_dim=128, linear_num_key_heads=1, linear_num_value_heads=2, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=64, shared_expert_intermediate_size=64, bos_token_id=1, eos_token_id=2,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
        )
    )  # fmt: skip


def latent(vocab: int) -> Any:
    """2-layer DeepSeek-V2: multi-head latent attention. The KV tiers refuse it."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32,
            n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=64, first_k_dense_replace=2,
            max_position_embeddings=8192, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


LAYOUTS: dict[str, Callable[[int], Any]] = {
    "full": full, "sliding": sliding, "sinks": sinks, "mamba": mamba, "gdn": gdn, "latent": latent,
}  # fmt: skip


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
        try:
            os.rename(work, output)
        except OSError:
            if not output.is_dir():  # else another process made the same model meanwhile
                raise
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
