"""One mock graph for this directory: two prefill and two decode workers, router, gateway; and a model with tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.mockgraph import MODEL, MockGraph, get, wait

TOOLED = "tooled-model"
TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + ' ' }}{{- call.function.arguments | tojson }}{{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


@pytest.fixture(scope="package")
def tooled_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample model's tokenizer with a chat template that renders tools, calls and a template option."""
    path = tmp_path_factory.mktemp("model") / "tooled"
    path.mkdir()
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        shutil.copy(MODEL / name, path / name)
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="package")
def graph(tmp_path_factory: pytest.TempPathFactory, tooled_model: Path) -> Iterator[MockGraph]:
    with MockGraph(
        tmp_path_factory.mktemp("mock"), prefill=2, decode=2, token_ms=1.0, gateway={"canary_after_s": 60}
    ) as g:
        g.start_worker("aggregated", 0, served_model=TOOLED, component="tooled", model=tooled_model)
        wait("the tooled model", lambda: TOOLED.encode() in get(g.frontend + "/v1/models")[1])
        yield g
