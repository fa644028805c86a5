"""Sample models that `model.source: sample:NAME` may name, and the tool that makes each."""

from __future__ import annotations

SAMPLES = {"smollm2-135m-instruct": "tools.sample_model", "tiny-full": "tools.tiny_model"}
