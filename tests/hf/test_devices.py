"""Models on other devices than the CPU, and on several: emulated, since there are none here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import on_fake_devices
import pytest
import torch

from hf_cb.attention.step import LayerSpec
from hf_cb.hf import build

pytestmark = pytest.mark.timeout(120)
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the program found: it has a process of its own, where torch may learn of another kind of device."""
    folders = [str(HERE), str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / "on_fake_devices.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_devices_are_strict(found: dict[str, Any]) -> None:
    assert found["across"].startswith("Expected all tensors to be on the same device")


@pytest.mark.parametrize("case", on_fake_devices.CASES)
def test_layers_on_two_devices(found: dict[str, Any], case: str) -> None:
    """Every layer's keys and values on its device; the tokens of the whole model on one."""
    got = found[case]
    assert (got["reason"], got["native"], got["alone"], got["company"]) == (None, {}, True, True)
    assert got["devices"] == ["far:0", "far:0", "far:1"]
    assert got["attention"] == "torch_grouped"


def test_swapping_between_devices(found: dict[str, Any]) -> None:
    assert found["swapped"]["swaps"] > 0


def test_a_layer_that_waits_on_the_host(found: dict[str, Any]) -> None:
    """Its weights are loaded for each call; its keys and values stay where it runs."""
    got = found["a layer on the host"]
    assert (got["reason"], got["native"], got["alone"], got["company"]) == (None, {}, True, True)
    assert got["devices"] == ["far:0", "far:0", "far:1"]


def test_any_device(found: dict[str, Any]) -> None:
    """The last resort asks for nothing that only a CPU has, or only CUDA."""
    got = found["one device"]
    assert (got["reason"], got["native"], got["alone"], got["company"]) == (None, {}, True, True)
    assert set(got["devices"]) == {"far:0"}


def test_the_room_for_a_cache_over_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the fullest device has room for, of what it takes of each block."""
    small, large = torch.device("cpu"), torch.device("meta")
    monkeypatch.setattr(build, "_free_memory", {small: 1000, large: 9000}.__getitem__)
    specs = [LayerSpec(4, 2, 8, 8, torch.float32, device, 1.0) for device in (small, large, large, large)]
    assert build._room(specs) == 4000  # 1000 bytes for one layer of four
    assert build._room(specs[1:]) == 9000
    assert build._room(specs[:1]) == 1000
