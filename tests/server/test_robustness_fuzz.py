"""Requests drawn from the application's own schema: good ones, nearly good ones and bad ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from live import Live, live_server
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from test_robustness_bytes import assert_error
from web import MODEL

pytestmark = pytest.mark.timeout(60)

GENERATION = ["/v1/chat/completions", "/v1/completions"]
READING = ["/v1/models", "/v1/models/{name}", "/health", "/health/live", "/health/ready"]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FEW = settings(max_examples=50, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def modest(folder: Path) -> Iterator[Live]:
    """A server that does little for anybody."""
    with live_server(folder, max_n=2, max_prompts=2, max_new_tokens=4) as live, live.left_clean():
        yield live


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize("mode", GenerationMode)
def test_generation(modest: Live, session: requests.Session, path: str, mode: GenerationMode) -> None:
    statuses = Counter()

    @given(case=operation(modest, "POST", path).as_strategy(generation_mode=mode))
    @FEW
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            for name, value in {"model": MODEL, "max_tokens": 2, "max_completion_tokens": 2, "n": 1}.items():
                if type(case.body.get(name)) is type(value):  # else none would come as far as the engine
                    case.body[name] = value
        statuses[check(case, session)] += 1

    ask()
    assert statuses[400]
    assert statuses[200] or mode is GenerationMode.NEGATIVE


@pytest.mark.parametrize("path", READING)
def test_reading(modest: Live, session: requests.Session, path: str) -> None:
    @given(case=operation(modest, "GET", path).as_strategy())
    @FEW
    def ask(case: schemathesis.Case) -> None:
        check(case, session)

    ask()


def operation(live: Live, method: str, path: str) -> schemathesis.APIOperation:
    return schemathesis.openapi.from_url(f"{live.url}/openapi.json")[path][method]


def check(case: schemathesis.Case, session: requests.Session) -> int:
    """The status of an answer that is as the schema says."""
    response = case.call(session=session, timeout=20)
    case.validate_response(response, checks=CHECKS)
    if response.status_code >= 400:
        assert_error(response.json())
    return response.status_code
