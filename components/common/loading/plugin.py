"""vLLM's `vllm.general_plugins` entry point. Runs in every vLLM process: imports nothing heavy."""

from __future__ import annotations

LOAD_FORMAT = "dynamo_blob"


def register() -> None:
    """Make ``load_format="dynamo_blob"`` known to vLLM. Idempotent."""
    from vllm.model_executor import model_loader

    if LOAD_FORMAT in getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {}):
        return
    from components.common.loading.loader import BlobModelLoader

    model_loader.register_model_loader(LOAD_FORMAT)(BlobModelLoader)
