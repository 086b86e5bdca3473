"""Runs quantised_models.py in a process of its own, with the libraries that `make test` keeps apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = Path(sys.prefix) / "quantized"


@pytest.mark.timeout(120)
@pytest.mark.skipif(not (LIBRARIES / "torchao").is_dir(), reason=f"{LIBRARIES} has no torchao: make test puts it there")
def test_quantised_models() -> None:
    path = os.pathsep.join([str(LIBRARIES), os.environ.get("PYTHONPATH", "")])
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(here.with_name("quantised_models.py"))],
        cwd=here.parents[2],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
