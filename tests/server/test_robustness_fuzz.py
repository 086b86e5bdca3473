"""Requests drawn from the application's own schema: good ones, nearly good ones and bad ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from live import Live
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from test_robustness_bytes import assert_error
from web import MODEL

pytestmark = pytest.mark.timeout(60)

OPERATIONS = ["POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "GET /v1/models/{name}", "GET /health"]


@pytest.fixture
def session(live: Live) -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("mode", GenerationMode)
def test_every_answer_is_of_the_schema(live: Live, session: requests.Session, operation: str, mode: GenerationMode) -> None:
    method, path = operation.split()
    api = schemathesis.openapi.from_url(f"{live.url}/openapi.json")[path][method]

    @given(case=api.as_strategy(generation_mode=mode))
    @settings(max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL
        response = case.call(session=session)
        print(response.status_code, response.text[:200], case.body if isinstance(case.body, dict) else "")
        case.validate_response(response, checks=[not_a_server_error, checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance])
        if response.status_code >= 400:
            assert_error(response.json())

    ask()
