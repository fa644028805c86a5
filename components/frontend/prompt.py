"""The prompt's token ids as Dynamo's frontend will have them, for the routing decision and the length check only.

The request itself is tokenised by Dynamo. Ids that differed would only cost affinity, but a wrong pin is worse than
none: whatever this module does not know how to render (images, continued messages, unknown options) gives None,
and the request goes without a pin. tests/unit/test_template_parity.py holds the set both sides must agree on.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

from components.common.errors import DynamoBlobError
from components.frontend.words import Words

_CHAT_PLAIN = frozenset(
    {
        "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop", "seed", "logprobs",
        "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "user", "nvext", "ignore_eos", "min_tokens", "min_p", "top_k",
        "repetition_penalty", "include_stop_str_in_output", "skip_special_tokens", "metadata", "store", "service_tier", "parallel_tool_calls", "cache_salt",
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern", "response_format",
        "return_tokens_as_token_ids", "prompt_logprobs",
    }
)  # fmt: skip
"""Chat fields that do not change the rendered prompt."""

_CHAT_RENDERED = frozenset({"tools", "tool_choice", "chat_template_args", "chat_template_kwargs"})

_TEMPLATE_OWN = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "documents"})

RENDERED_MOST = 20_000
"""Objects and lists in messages, tools and the arguments of their calls beyond which a prompt is not rendered: a hint is
not worth a second of a template's time."""

LONG_TEXT = 20_000
"""Characters beyond which tokenising belongs in a thread (about 5 ms)."""


class Renderer:
    """Tokenizer and chat template of one model directory. Thread safe."""

    def __init__(self, model_path: str) -> None:
        self.path = Path(model_path)
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(self.path / "tokenizer.json"))
            config = json.loads((self.path / "tokenizer_config.json").read_text())
        except Exception as e:
            raise DynamoBlobError(
                "GATEWAY-NO-TOKENIZER", "the gateway cannot read the model's tokenizer", where=str(self.path), why=str(e),
                do="point model_path at the release's small files (weights.root/<digest>)",
            ) from None  # fmt: skip
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.longest_token = max((len(t) for t in self.tokenizer.get_vocab()), default=1)
        self.special = {
            name: _text(config.get(name))
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name)
        }
        self.words = Words(self.tokenizer, ("<|im_start|>", "<|im_end|>"))
        self.adds_nothing = not self.tokenizer.encode("").ids
        source = _template(self.path, config)
        self.template = _environment().from_string(source) if source else None

    def chat(self, body: dict[str, Any]) -> str | None:
        """The rendered prompt; None when it is not certain to equal the frontend's."""
        if self.template is None or not body.keys() <= _CHAT_PLAIN | _CHAT_RENDERED:
            return None
        if _nested(body.get("messages"), body.get("tools")) > RENDERED_MOST:
            return None
        messages = _messages(body.get("messages"))
        options = body.get("chat_template_args") or body.get("chat_template_kwargs") or {}
        nvext = body.get("nvext") or {}
        if (
            messages is None
            or not isinstance(options, dict)
            or options.keys() & _TEMPLATE_OWN
            or nvext.get("use_raw_prompt")
        ):
            return None
        tools = body.get("tools")
        if body.get("tool_choice") == "none":
            tools = None
        if tools is not None and not _whole_tools(tools):
            return None
        try:
            return self.template.render(
                messages=messages, tools=tools, add_generation_prompt=True, **self.special, **options
            )
        except Exception:  # the template's own refusal, or one only this renderer has: the frontend will tell
            return None

    def completion(self, body: dict[str, Any]) -> str | list[int] | None:
        """The one prompt of a completions request, text or ids; None for batches."""
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i < 2**32 for i in prompt):
            return prompt
        return None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = text.replace("\0", "")  # as Dynamo does before tokenising
        if self.adds_nothing or not add_special_tokens:
            return self.words.encode(text)
        return list(self.tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids)


def _nested(messages: Any, tools: Any) -> int:
    """Objects and lists that rendering would walk, those in the text of tool calls' arguments included (never fewer)."""
    todo: list[Any] = [messages, tools]
    seen = 0
    while todo and seen <= RENDERED_MOST:
        item = todo.pop()
        if isinstance(item, dict):
            arguments = item.get("arguments")
            if isinstance(arguments, str):
                seen += arguments.count("[") + arguments.count("{")
        elif not isinstance(item, list):
            continue
        seen += 1
        todo += item.values() if isinstance(item, dict) else item
    return seen


def _messages(messages: Any) -> list[dict[str, Any]] | None:
    if not isinstance(messages, list) or not messages:
        return None
    out = []
    for m in messages:
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            return None
        content = m.get("content")
        if isinstance(content, list):
            if not content or not all(
                isinstance(p, dict)
                and p.keys() == {"type", "text"}
                and p["type"] == "text"
                and isinstance(p["text"], str)
                for p in content
            ):
                return None
            m = {**m, "content": "\n".join(p["text"] for p in content)}
        elif content is not None and not isinstance(content, str):
            return None
        if m.get("tool_calls") is not None:
            calls = _tool_calls(m["tool_calls"])
            if calls is None:
                return None
            m = {**m, "tool_calls": calls}
        out.append(m)
    return out


def _tool_calls(calls: Any) -> list[dict[str, Any]] | None:
    """Arguments arrive as JSON text and are rendered as objects, as Dynamo does."""
    out = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(call, dict)
            or not isinstance(function, dict)
            or not isinstance(function.get("arguments"), str)
        ):
            return None
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            return None
        if not isinstance(arguments, dict):
            return None
        out.append({**call, "function": {**function, "arguments": arguments}})
    return out


def _whole_tools(tools: Any) -> bool:
    """Only tools that state everything: Dynamo fills in what is absent, and templates print it."""
    return (
        isinstance(tools, list)
        and bool(tools)
        and all(
            isinstance(t, dict) and t.keys() == {"type", "function"} and isinstance(t["function"], dict)
            and t["function"].keys() == {"name", "description", "parameters"} and isinstance(t["function"]["parameters"], dict)
            for t in tools
        )
    )  # fmt: skip


def _template(path: Path, config: dict[str, Any]) -> str:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    found = config.get("chat_template")
    if isinstance(found, list):  # named templates
        found = next((t.get("template") for t in found if t.get("name") == "default"), "")
    return found or ""


def _environment() -> jinja2.Environment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
