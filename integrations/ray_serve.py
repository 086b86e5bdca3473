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
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

# Ray kills a proxy that isn't there in 5 s, which a busy machine may well need. Read when Ray is imported.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")

import ray
from pydantic import PositiveInt, ValidationError, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig
from typing_extensions import Self

import hf_cb
from hf_cb.server.settings import ServerSettings
from integrations.ray_replica import Replica, ReplicaSettings, keys_of_environment

APP = "hf_cb"
_OBJECT_STORE = 100 << 20  # bytes: requests and answers are messages, Ray's shared memory stays empty


class Deployed(ReplicaSettings):
    """The settings of replicas, and of how many there are. `ongoing`: requests that run or wait, on one replica."""

    replicas: PositiveInt = 1
    max_replicas: PositiveInt | None = None  # None: `replicas`, always
    ongoing: PositiveInt = 64  # to aim at; with more on average there are new replicas, as far as there may be
    upscale_delay: float = 10  # seconds that the queue has to be long, or short
    downscale_delay: float = 300
    max_ongoing: PositiveInt = 256  # more than that wait in front of the replicas
    max_queued: PositiveInt = 2048  # more than that get status 429
    cpus: float = 1
    gpus: float = 0
    drain_seconds: float = 600

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"--max-replicas: takes at least as many as --replicas, {self.replicas}; got {self.max_replicas}")
        return self

    @property
    def most(self) -> int:
        """The most replicas that there may be."""
        return self.max_replicas or self.replicas


def build(fields: Deployed | dict[str, Any]) -> serve.Application:
    """The application, for `serve run` and `serve deploy` too, which give `Deployed`'s fields, as text or as they are."""
    settings = Deployed.model_validate(fields)
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="replica",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.replicas,
            max_replicas=settings.most,
            target_ongoing_requests=settings.ongoing,
            upscale_delay_s=settings.upscale_delay,
            downscale_delay_s=settings.downscale_delay,
        ),
        max_ongoing_requests=settings.max_ongoing,
        max_queued_requests=settings.max_queued,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        request_router_config=RequestRouterConfig(
            request_router_class="integrations.ray_router.SessionRouter",
            request_router_kwargs={"num_fallback_replicas": settings.most - 1},
        ),
        health_check_period_s=2,
        graceful_shutdown_timeout_s=settings.drain_seconds,
    )
    return deployment.bind(ReplicaSettings(**settings.model_dump(include=set(ReplicaSettings.model_fields))))


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    settings = Deployed(**{name: value for name, value in vars(args).items() if name in Deployed.model_fields})
    told_to_end = threading.Event()
    with _cluster(args.address, settings):
        serve.start(http_options={"host": args.host, "port": args.port}, proxy_location="EveryNode")
        _start(settings)
        for number in (signal.SIGTERM, signal.SIGINT):  # not sooner: Ray puts a handler of its own
            signal.signal(number, lambda *_: told_to_end.set())
        print(f"http://{args.host}:{args.port}/v1", flush=True)
        told_to_end.wait()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C doesn't wait
        print("finishing what was accepted", file=sys.stderr)
        _drain(settings.drain_seconds)


def _start(settings: Deployed) -> None:
    try:
        serve.run(build(settings), name=APP)
    except RuntimeError:
        states = serve.status().applications[APP].deployments.values()
        lines = "\n".join(state.message for state in states).strip().splitlines()
        sys.exit(f"no replica has started: {lines[-1] if lines else 'see the logs of Ray'}")


@contextlib.contextmanager
def _cluster(address: str | None, settings: Deployed) -> Iterator[None]:
    """The cluster at `address`, of which only our application ends, or one of this machine that ends with this process."""
    if address is not None:
        try:
            ray.init(address, log_to_driver=False)
        except ConnectionError as error:
            sys.exit(f"--address: {str(error).splitlines()[0]}")
    else:
        cpus = max(os.cpu_count() or 1, math.ceil(settings.cpus * settings.most))
        ray.init("local", num_cpus=cpus, object_store_memory=_OBJECT_STORE, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        if address is None:
            serve.shutdown()
        else:
            serve.delete(APP, _blocking=False)
        ray.shutdown()


def _drain(seconds: float) -> None:
    """Take the application away. Its replicas get no new requests, and end when they have answered those that they have."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):  # Ray's own patience, shorter than ours
            serve.delete(APP)
            break


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m integrations.ray_serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="id or folder of a causal language model (default: the packaged one)")
    add("--name", help="what clients call it (default: the last part of --model)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="auto: the checkpoint's own")
    add("--engine", type=json.loads, default={}, metavar="JSON", help="fields of CBConfig")
    add("--replicas", type=int, default=1, help="that there are always (%(default)s)")
    add("--max-replicas", type=int, help="the most that the queue calls for (default: no more than --replicas)")
    add("--ongoing", type=int, default=64, help="requests that run or wait on a replica, to aim at (%(default)s)")
    add("--upscale-delay", type=float, default=10, metavar="SECONDS", help="of a long queue before a new one (%(default)s)")
    add("--cpus", type=float, default=1, help="cores of each replica (%(default)s)")
    add("--gpus", type=float, default=0, help="GPUs of each replica (%(default)s)")
    add("--address", help="of a Ray cluster, auto for this machine's (default: a new one on this machine alone)")
    add("--host", default="127.0.0.1", help="where the proxies listen; 0.0.0.0 for the network (%(default)s)")
    add("--port", type=int, default=8000, help="(%(default)s)")
    add("--allow-without-keys", action="store_true", help="let everybody on the network ask, though $HF_CB_API_KEYS is empty")
    args = parser.parse_args(argv)
    try:
        ServerSettings(args.host, args.port, keys_of_environment(), args.allow_without_keys).check_bind()
        if args.address is None:
            socket.create_server((args.host, args.port)).close()  # Ray would find out after half a minute, in many lines
        Deployed(**{name: value for name, value in vars(args).items() if name in Deployed.model_fields})
    except OSError as error:
        parser.error(f"--port: {args.host}:{args.port}: {error.strerror}")
    except hf_cb.InvalidArgumentError as error:
        parser.error(f"--{error}; keys come from $HF_CB_API_KEYS, or --allow-without-keys")
    except ValidationError as error:
        problem = error.errors()[0]
        field = f"--{problem['loc'][0]}: {problem['msg']}" if problem["loc"] else str(problem["ctx"]["error"])
        parser.error(field)
    return args


if __name__ == "__main__":
    main()
