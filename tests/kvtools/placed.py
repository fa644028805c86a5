"""A vLLM worker extension: what lies in the model after loading, derived tensors included."""

from __future__ import annotations

import torch
from blake3 import blake3


class Placed:
    """`worker_extension_cls` for engines whose weights a test looks at."""

    def placed_digests(self) -> dict[str, str]:
        """Name -> digest of every tensor of the model: parameters, buffers, and plain attributes (MLA keeps its derived matrices there)."""
        found: dict[str, torch.Tensor] = {}
        for prefix, module in self.model_runner.model.named_modules():
            own = {**module._parameters, **module._buffers, **vars(module)}
            for name, value in own.items():
                if isinstance(value, torch.Tensor) and "kv_cache" not in name:
                    found[f"{prefix}.{name}"] = value
        return {
            name: blake3(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, t in found.items()
            if t.numel()
        }
