"""Plain generate and the engine side by side, for the tests that change nothing about either."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import seam


@pytest.fixture(scope="module")
def duo() -> Iterator[seam.Duo]:
    with seam.duo() as made:
        yield made
