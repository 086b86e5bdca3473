"""A tiny chat model, and one server of it for the tests that change nothing about either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_chat
import web
from live import MAX_BODY, QUEUE, SEATS, Live, live_server


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[web.Running]:
    with web.running(web.tiny(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def _live(folder: Path) -> Iterator[Live]:
    with live_server(folder, max_body_bytes=MAX_BODY) as live:
        yield live


@pytest.fixture
def live(_live: Live) -> Iterator[Live]:
    """A server that is patient. Nothing of the test is left in it."""
    with _live.left_clean():
        yield _live


@pytest.fixture(scope="module")
def _impatient(folder: Path) -> Iterator[Live]:
    with live_server(folder, read_timeout=0.3, write_timeout=0.3) as live:
        yield live


@pytest.fixture
def impatient(_impatient: Live) -> Iterator[Live]:
    """One that waits for nobody."""
    with _impatient.left_clean():
        yield _impatient


@pytest.fixture
def crowded(folder: Path) -> Iterator[Live]:
    """One in which few may wait."""
    with live_server(folder, {"max_batch_size": SEATS, "max_queue_size": QUEUE}) as live, live.left_clean():
        yield live
