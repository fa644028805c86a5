"""vLLM's model loader for ``load_format="dynamo_blob"``: verified tensors straight out of Blob.

vLLM passes ``model_loader_extra_config={"weights": <WeightsConfig as JSON>}``. Counters, or the error,
go to the report file: vLLM tells its parent process nothing but that the engine failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from components.common.errors import DynamoBlobError
from components.common.loading.config import WeightsConfig
from components.common.loading.report import Report
from components.common.storage.errors import clean

log = logging.getLogger("vllm.dynamo_blob.loader")


class BlobModelLoader(BaseModelLoader):
    """Fails closed: no tensor is yielded that was not verified, and any doubt ends the load."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra = load_config.model_loader_extra_config or {}
        if not isinstance(extra, dict) or set(extra) != {"weights"}:
            raise DynamoBlobError(
                "WEIGHTS-CONFIG", "load_format dynamo_blob needs model_loader_extra_config={'weights': WeightsConfig}",
                why=f"found keys {sorted(extra) if isinstance(extra, dict) else type(extra).__name__}", do="start the worker through its plan",
            )  # fmt: skip
        self.weights = WeightsConfig.parse(extra["weights"], where="model_loader_extra_config.weights")

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing: weights never touch a disk here."""

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        from components.common.loading.ranks import from_vllm
        from components.common.loading.session import open_session

        ranks = from_vllm()
        report = Report(self.weights.report if ranks is None or ranks.rank == 0 else "")
        try:
            with open_session(self.weights, Path(model_config.model), report, ranks=ranks) as session:
                needed = {name for name, _ in model.named_parameters()}
                loaded = model.load_weights(self._tensors(session, report))
                if loaded is not None and model_config.quantization is None and (missing := needed - loaded):
                    raise DynamoBlobError(
                        "WEIGHTS-INCOMPLETE", f"the release lacks {len(missing)} parameters of the model", where=session.manifest.model,
                        why=", ".join(sorted(missing)[:5]), do="publish the whole model",
                    )  # fmt: skip
            report.finish()
        except DynamoBlobError as e:
            report.fail(e)
            raise
        except Exception as e:
            report.fail(
                DynamoBlobError(
                    "WEIGHTS-LOAD-FAILED",
                    "the weights could not be loaded",
                    where=model_config.model,
                    why=f"{type(e).__name__}: {clean(str(e))[:300]}",
                )
            )
            raise
        log.info("dynamo_blob: %s", report.as_json())

    def _tensors(self, session: Any, report: Report) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything the release holds; the generator runs to its end, so every byte is verified before we are ready."""
        began = asked = time.monotonic()
        waited = 0.0  # the engine's, for the next tensor
        for name, tensor in _on_device(session):
            waited += time.monotonic() - asked
            if not report.counts["tensors"]:
                report.set(first_tensor_s=round(time.monotonic() - began, 4))
            report.set(last_tensor=name)
            yield name, tensor
            asked = time.monotonic()
        waited += time.monotonic() - asked
        report.set(all_tensors_s=round(time.monotonic() - began, 4), waited_s=round(waited, 4))


def _on_device(session: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if not torch.cuda.is_available():
        return session.tensors()  # type: ignore[no-any-return]
    from components.common.loading.cuda import Cuda, pin, staged

    return staged(session.tensors(pin=pin), Cuda())
