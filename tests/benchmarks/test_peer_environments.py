from __future__ import annotations

import subprocess

import pytest

from benchmarks import peer_environments
from benchmarks.peer_environments import Environment

pytestmark = pytest.mark.timeout(120)  # making an environment copies pip into it


def test_an_environment_is_made_once_and_again_when_it_should_hold_something_else(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("HF_CB_CACHE", str(tmp_path))
    monkeypatch.setitem(peer_environments.ENVIRONMENTS, "small", Environment(("pip",)))  # which every one has: no download
    peer_environments.set_up("small")
    prefix = subprocess.run(
        [peer_environments.python("small"), "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    )
    assert prefix.stdout.strip() == str(tmp_path / "peers" / "small")
    assert "setting up" in capfd.readouterr().out

    mark = tmp_path / "peers" / "small" / "kept"
    mark.touch()
    peer_environments.set_up("small")
    assert mark.exists()
    assert "setting up" not in capfd.readouterr().out

    monkeypatch.setitem(peer_environments.ENVIRONMENTS, "small", Environment(("pip>=20",)))
    with pytest.raises(FileNotFoundError, match="small is not set up here"):
        peer_environments.python("small")
