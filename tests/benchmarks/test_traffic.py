"""The commands about real traffic, in small: the prefix cache, the policies, long prompts, and a short soak."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from benchmarks import forks, long_prompts, policies, prefix, soak

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model in the place of the packaged one."""
    model = soak.tiny_model()
    for module in (prefix, long_prompts, forks):
        monkeypatch.setattr(module, "load", lambda _: (model, None))
    return model


def test_prefix(tiny: Any, tmp_path: Any) -> None:
    """The command itself compares the computed tokens with the least there could be, and the tokens with the cache off."""
    prefix.main(["--requests", "12", "--turns", "4", "--scale", "0.2", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {"shared prefix", "chat"}
    for parts in figures.values():
        assert parts["on"]["computed_tokens"] < parts["off"]["computed_tokens"]
        assert parts["ratio"]["computed_tokens"] > 1


def test_forks(tiny: Any, tmp_path: Any) -> None:
    """The command itself compares every answer with plain generate's."""
    forks.main(["--requests", "4", "--repeats", "1", "--scale", "0.5", "--json", str(tmp_path / "figures.json")])
    for figures in json.loads((tmp_path / "figures.json").read_text()).values():
        assert 0 < figures["blocks"] < figures["blocks_unshared"] / 2


def test_policies(tmp_path: Any) -> None:
    policies.main(["--seconds", "30", "--plot", str(tmp_path / "curves.png"), "--json", str(tmp_path / "curves.json")])
    figures = json.loads((tmp_path / "curves.json").read_text())
    by = figures["policies"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert all(len(c["times"]) == len(s) for c in figures["curves"].values() for s in c["service"].values())
    for tenant in ("steady", "bursts"):
        assert by["fair"][tenant]["x_own_share"] <= 2 < by["fcfs"][tenant]["x_own_share"]
        assert by["priority"][tenant]["x_own_share"] <= 2


def test_long_prompts(tiny: Any, tmp_path: Any) -> None:
    arguments = ["--streams", "3", "--stream-tokens", "120", "--prompts", "2", "--prompt-tokens", "300", "--target-itl-ms", "8"]
    long_prompts.main([*arguments, "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {"whole", "default", "target", "target / whole"}
    assert all(value > 0 for values in figures.values() for value in values.values())


@pytest.mark.timeout(240)
@pytest.mark.soak
def test_a_soak_of_two_minutes(caplog: pytest.LogCaptureFixture) -> None:
    # It logs each step that fails, and pytest would keep them all, with their frames: that is no memory of the engine's.
    with caplog.at_level(logging.CRITICAL, "hf_cb"):
        figures = soak.soak(seconds=120.0, seed=3)
    for kind in ("survived", "beams and samples", "cancelled", "timed out", "failed"):
        assert figures[f"requests {kind}"] > 10
    assert figures["preemptions"] > 0
    assert figures["swaps"] > 0
    assert figures["cached_tokens"] > 0
    assert figures["resident_mib_at_the_end"] < figures["resident_mib_after_a_quarter"] + 64
