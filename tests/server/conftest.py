from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_chat
from live import QUEUE, Live, live_server

from hf_cb.server.settings import ServerSettings


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def _live(folder: Path) -> Iterator[Live]:
    with live_server(folder, ServerSettings(port=0, max_body_bytes=1 << 20)) as live:
        yield live


@pytest.fixture
def live(_live: Live) -> Iterator[Live]:
    """A server that is patient; nothing of the test is left in it."""
    yield _live
    _live.check_clean()


@pytest.fixture(scope="module")
def _impatient(folder: Path) -> Iterator[Live]:
    with live_server(folder, ServerSettings(port=0, read_timeout=0.3, write_timeout=0.3)) as live:
        yield live


@pytest.fixture
def impatient(_impatient: Live) -> Iterator[Live]:
    """One that waits for nobody."""
    yield _impatient
    _impatient.check_clean()


@pytest.fixture
def crowded(folder: Path) -> Iterator[Live]:
    """One in which few may wait."""
    with live_server(folder, ServerSettings(port=0), max_queue_size=QUEUE) as live:
        yield live
        live.check_clean()
