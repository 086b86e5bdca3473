"""The OpenAI endpoints over replicas of one model: on the cores or GPUs of this machine, or on a Ray cluster.

python -m integrations.ray_serve --replicas 2                        # then http://127.0.0.1:8000/v1
python -m integrations.ray_serve --replicas 1 --max-replicas 8       # as many as the queue asks for
python -m integrations.ray_serve --address auto --gpus 1 --model id  # on the cluster that `ray start` made
serve run integrations.ray_serve:build replicas=2                    # the same by Ray's own command

Each replica is a process with its own engine. Requests with a header `x-session-id` go to the replica that has the session in
its prefix cache, the others to the one with less to do. A replica that dies is replaced: requests that had no answer yet get
status 500, which the openai client tries again by itself, and streams end with an error. SIGTERM and Ctrl-C end it when all
that was accepted is answered.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

import ray
from pydantic import PositiveInt, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig
from typing_extensions import Self

from integrations.ray_replica import Replica, ReplicaSettings

APP = "hf_cb"
_OBJECT_STORE = 100 << 20  # bytes: requests and answers are messages, Ray's shared memory stays empty


class Deployed(ReplicaSettings):
    """The settings of replicas, and of how many there are. `ongoing`: requests that run or wait, on one replica."""

    replicas: PositiveInt = 1
    max_replicas: PositiveInt | None = None  # None: `replicas`, always
    ongoing: PositiveInt = 64  # to aim at; with more on average there are new replicas, as far as there may be
    max_ongoing: PositiveInt = 256  # more than that wait in front of the replicas
    max_queued: PositiveInt = 2048  # more than that get status 429
    cpus: float = 1
    gpus: float = 0
    drain_seconds: float = 600

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas: takes at least as many as replicas, {self.replicas}; got {self.max_replicas}")
        return self


def build(settings: Deployed) -> serve.Application:
    """The application, for `serve run` and `serve deploy` too."""
    most = settings.max_replicas or settings.replicas
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="replica",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.replicas,
            max_replicas=most,
            target_ongoing_requests=settings.ongoing,
            upscale_delay_s=10,
            downscale_delay_s=300,
        ),
        max_ongoing_requests=settings.max_ongoing,
        max_queued_requests=settings.max_queued,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        request_router_config=RequestRouterConfig(
            request_router_class="integrations.ray_router.SessionRouter",
            request_router_kwargs={"num_fallback_replicas": most - 1},
        ),
        health_check_period_s=2,
        graceful_shutdown_timeout_s=settings.drain_seconds,
    )
    return deployment.bind(ReplicaSettings(**settings.model_dump(include=set(ReplicaSettings.model_fields))))
