"""The doctor tells what is well, and what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cb import doctor
from hf_cb.attention.native import NativeCPUBackend
from hf_cb.cli.main import main

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller model for the speed, and less memory to read."""
    make = doctor._model
    monkeypatch.setattr(doctor, "_bandwidth", lambda _: 1e10)
    monkeypatch.setattr(doctor, "_model", lambda *args, **sizes: make(*args, **{**sizes, "num_hidden_layers": 1}))


def test_a_healthy_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--json", str(tmp_path / "report.json")]) == 0
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert f"torch           {torch.__version__}" in printed
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert report["is_well"]
    assert list(report["backends"]["float32"].values()).count("chosen") == 1
    assert report["backends"]["float32"]["flash_attn_2"] == "runs on cuda, not on cpu"
    assert report["speed"]["tokens_per_second"] > 0
    assert report["speed"]["share_of_bandwidth"] > 0


def test_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    attend = NativeCPUBackend.attend
    monkeypatch.setattr(NativeCPUBackend, "attend", lambda *args, **kwargs: 1.1 * attend(*args, **kwargs))
    monkeypatch.setattr(doctor, "_speed", lambda _: {})
    assert main(["doctor", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG  attention in float32" in printed
    assert "native_cpu is off by" in printed
    assert "WRONG  same tokens as plain generate()" in printed


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "nonsense"]) == 1
    assert capsys.readouterr().err.startswith("hf-cb: --device: ")


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nurse"])
    assert "doctor" in capsys.readouterr().err
