"""What runs in a replica's process, without Ray round it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_chat
from pydantic import ValidationError

import hf_cb
from integrations.ray_replica import Replica, ReplicaSettings

pytestmark = pytest.mark.timeout(20)


def test_a_replica_is_healthy_as_long_as_its_engine_lives(tmp_path: Path) -> None:
    replica = Replica(ReplicaSettings(model=str(tiny_chat.save(tmp_path)), engine={"max_batch_size": 3}))
    replica.check_health()
    assert replica.served.engine.config.max_batch_size == 3
    replica.served.engine._worker._die(RuntimeError("it broke"))
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
