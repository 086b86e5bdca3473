"""What runs in a replica's process, without Ray round it."""

from __future__ import annotations

import sys
from pathlib import Path

import inside
import pytest
import tiny_chat
from processes import Program
from pydantic import ValidationError

import hf_cb
from integrations.ray_replica import Replica, ReplicaSettings

pytestmark = pytest.mark.timeout(60)


def test_a_replica_is_healthy_as_long_as_its_engine_lives(tmp_path: Path) -> None:
    replica = Replica(ReplicaSettings(model=str(tiny_chat.save(tmp_path)), engine={"max_batch_size": 3}))
    replica.check_health()
    assert replica.served.engine.config.max_batch_size == 3
    inside.kill(replica.served.engine, RuntimeError("it broke"))
    with pytest.raises(hf_cb.EngineDeadError, match=tmp_path.name):
        replica.check_health()


def test_a_replica_that_ends_takes_hf_cb_off_its_model(tmp_path: Path) -> None:
    replica = Replica(ReplicaSettings(model=str(tiny_chat.save(tmp_path))))
    engine = replica.served.engine
    del replica
    assert not engine.is_open


@pytest.mark.parametrize("wrong", [{"dtype": "int3"}, {"engine": 3}, {"replicas": 2}])
def test_settings_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        ReplicaSettings(**wrong)


def test_rays_own_command_gives_the_settings_as_text() -> None:
    """In a process of its own: importing Ray Serve warns."""
    code = (
        "from integrations.ray_serve import build; app = build({'replicas': '2', 'max_replicas': '3', 'cpus': '0.5'});"
        "config = app._bound_deployment._deployment_config;"
        "print(config.autoscaling_config.min_replicas, config.autoscaling_config.max_replicas)"
    )
    with Program(sys.executable, "-c", code) as program:
        status, printed = program.wait()
    assert (status, printed.split()[-2:]) == (0, ["2", "3"]), printed
