"""Requests made from the gateway's own OpenAPI description, valid and broken: never a 5xx, always a described answer.

schemathesis 4.32's own pytest plugin fails on pytest 9 (it reads Function._nodeid), so its strategies are driven by hypothesis directly.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bench.mockgraph import MockGraph

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/{model}"), ("GET", "/health"), ("GET", "/live")
]  # fmt: skip


@pytest.fixture(scope="module")
def api(graph: MockGraph) -> Any:
    return schemathesis.openapi.from_url(graph.gateway + "/openapi.json")


def test_every_route_is_described(api: Any) -> None:
    described = {(o.ok().method.upper(), o.ok().path) for o in api.get_all_operations()}
    assert described == set(OPERATIONS)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_an_operation_answers_as_described(api: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = api[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("nothing to break: no body, and any text is a model's name")
    statuses = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def run(case: Any) -> None:
        response = case.call(timeout=30)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    run()
    if mode is GenerationMode.POSITIVE and "{" not in path:
        assert 200 in statuses, statuses
    if mode is GenerationMode.NEGATIVE:
        assert statuses & {400, 404, 415, 422}, statuses
