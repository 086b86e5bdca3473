"""A tiny chat model, and one server of it for the tests that change nothing about either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_chat
import web


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[web.Running]:
    with web.running(web.tiny(folder)) as running:
        yield running
