"""Dynamo's preprocessed request -> vLLM SamplingParams.

Only fields vLLM knows are taken. Stop strings stay with Dynamo's frontend, which detokenises; the
engine stops on token ids. An impossible value raises ENGINE-SAMPLING-INVALID, which the client sees
as a bad request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from components.common.errors import DynamoBlobError

if TYPE_CHECKING:
    from vllm import SamplingParams

_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "logit_bias", "bad_words_token_ids",
)  # fmt: skip
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos")


def sampling_params(
    request: dict[str, Any], defaults: dict[str, Any], room: int, extra_args: dict[str, Any] | None = None
) -> SamplingParams:
    """The parameters of one request.

    defaults    the model's own (generation_config.json), as vLLM reads them
    room        tokens left in the context after the prompt; bounds max_tokens
    extra_args  {"kv_transfer_params": {...}} for the connectors
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    options = request.get("sampling_options") or {}
    stop = request.get("stop_conditions") or {}
    fields: dict[str, Any] = dict(defaults)
    fields.update({k: options[k] for k in _SAMPLING if options.get(k) is not None})
    fields.update({k: stop[k] for k in _STOPPING if stop.get(k) is not None})
    fields["max_tokens"] = max(1, min(fields.get("max_tokens") or room, room))
    if fields.get("min_tokens"):
        fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"])
    ids = [*(stop.get("stop_token_ids") or []), *(stop.get("stop_token_ids_hidden") or [])]
    if ids:
        fields["stop_token_ids"] = sorted(set(ids))
    bad_words = fields.pop("bad_words_token_ids", None)
    fields.update(_logprobs(request.get("output_options") or {}))
    guided = {k: v for k, v in (options.get("guided_decoding") or {}).items() if v is not None}
    try:
        if guided:
            fields["structured_outputs"] = StructuredOutputsParams(
                **{k: v for k, v in guided.items() if k in ("json", "regex", "choice", "grammar", "whitespace_pattern")}
            )
        params = SamplingParams(
            **fields, detokenize=False, output_kind=RequestOutputKind.CUMULATIVE, extra_args=extra_args
        )
    except (ValueError, TypeError, VLLMValidationError) as e:
        raise DynamoBlobError(
            "ENGINE-SAMPLING-INVALID", "the request's sampling options are not possible", why=str(e)
        ) from e
    if bad_words:
        params._bad_words_token_ids = bad_words
    return params


def _logprobs(output: dict[str, Any]) -> dict[str, int]:
    """`logprobs` and `prompt_logprobs` as non-negative ints; anything else is left out."""
    found: dict[str, int] = {}
    for name in ("logprobs", "prompt_logprobs"):
        value = output.get(name)
        if isinstance(value, (int, str)) and not isinstance(value, bool) and str(value).isdigit():
            found[name] = int(value)
    return found
