"""`hf-cb serve`: OpenAI's API over HTTP, for one model or several."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_cb.cli.arguments import MODEL, Commands, add_command, add_loading, count, load, named_as_options, seconds
from hf_cb.errors import InvalidArgumentError, NotInstalledError

if TYPE_CHECKING:
    from hf_cb.engine import Engine
    from hf_cb.server.models import ServedModel
    from hf_cb.server.settings import ServerSettings

_EXAMPLES = """\
  hf-cb serve ~/models/SmolLM2-135M-Instruct
  hf-cb serve chat=~/models/SmolLM2-135M-Instruct base=HuggingFaceTB/SmolLM2-135M    two models, named "chat" and "base"
  hf-cb serve MODEL --host 0.0.0.0 --api-key-file keys.txt --max-queue-size 256     for others on the network
  curl http://127.0.0.1:8000/v1/models
  hf-cb top                                                                         in another terminal
"""
_KEYS = "HF_CB_API_KEYS"

# Field -> (type, metavar, help). The names of the options are those of the fields.
SERVER: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "host": (str, "ADDRESS", "where to listen (default: 127.0.0.1, this machine alone)"),
    "port": (int, "PORT", "default: 8000; 0 takes any free one"),
    "max_body_bytes": (count, "N", "the largest request (default: 4 MiB)"),
    "max_n": (count, "N", "the most choices of one prompt (default: 16)"),
    "max_prompts": (count, "N", "the most prompts of one request for completions (default: 64)"),
    "max_prompt_tokens": (count, "N", "the longest prompt (default: what the model takes)"),
    "max_new_tokens": (count, "N", "the longest answer (default: what the model takes)"),
    "max_timeout": (seconds, "SECONDS", "the longest that a request may take (default: 600)"),
    "read_timeout": (seconds, "SECONDS", "for a request to come in (default: 60)"),
    "write_timeout": (seconds, "SECONDS", "for a client to take what it is sent (default: 60)"),
    "drain_timeout": (seconds, "SECONDS", "after SIGTERM, until what still runs is ended (default: no limit)"),
}
ENGINE: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "max_batch_size": (count, "N", "the most sequences that run at a time (default: 256)"),
    "max_batch_tokens": (count, "N", "the most tokens that a step computes"),
    "target_itl_ms": (float, "MS", "time between two tokens to aim at while prompts come in"),
    "kv_cache_memory": (str, "SIZE", "memory for the KV cache of each model, such as 4GiB"),
    "swap_space": (str, "SIZE", "host memory for preempted sequences, such as 4GiB"),
    "max_queue_size": (int, "N", "the most requests that wait; more are told to come back (default: no limit)"),
    "queue_timeout": (seconds, "SECONDS", "the longest that a request waits (default: no limit)"),
    "policy": (str, "NAME", "fcfs, priority or fair (default: fcfs)"),
}


def add_to(commands: Commands) -> None:
    """Make it one of the commands."""
    about = "Serve models over HTTP with OpenAI's API, /health and /metrics. The first Ctrl-C or SIGTERM finishes what runs."
    parser = add_command(commands, "serve", "serve models over HTTP with OpenAI's API", about, _EXAMPLES)
    parser.add_argument("models", metavar="[NAME=]MODEL", nargs="+", help=f"{MODEL}; NAME: what clients call it by")
    keys = parser.add_argument_group(
        "who may ask", f"Without keys, everybody on this machine. Also: ${_KEYS}, separated by commas."
    )
    keys.add_argument(
        "--api-key", metavar="KEY", action="append", default=[], help="a key that clients may show; several times"
    )
    keys.add_argument("--api-key-file", metavar="FILE", help="keys, one a line: unlike an option, no other user can see them")
    keys.add_argument("--allow-without-keys", action="store_true", help="let everybody on the network ask")
    for title, fields in (("server", SERVER), ("engine", ENGINE)):
        group = parser.add_argument_group(title)
        for name, (kind, metavar, text) in fields.items():
            group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    add_loading(parser)
    watching = parser.add_argument_group("observing")
    watching.add_argument("--no-metrics", action="store_true", help="don't answer /metrics")
    watching.add_argument("--json-logs", action="store_true", help="one JSON object a line on stderr, one for each request")
    watching.add_argument(
        "--trace",
        action="store_true",
        help="a span for each request, by the program's tracer provider: opentelemetry-instrument hf-cb serve --trace ...",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the models and serve them until told to end."""
    from hf_cb.server.run import serve

    with named_as_options():
        settings = settings_of(args)
    named = _named(args.models)
    _check_address(settings)  # before minutes of loading
    engines: dict[str, Engine] = {}
    metrics = None
    if not args.no_metrics:
        from hf_cb.metrics.collector import EngineCollector

        metrics = EngineCollector(engines).exposition
    with contextlib.ExitStack() as stack:
        if args.json_logs:
            from hf_cb.metrics.logs import log_as_json

            stack.callback(log_as_json())
        models = []
        for name, source in named:
            models.append(load(source, args, name, **_given(args, ENGINE)))
            stack.callback(_close, models[-1])
            engines[name] = models[-1].engine
            _observe(models[-1], args, stack)
        said = f"serving {', '.join(engines)} on"
        serve(models, settings, metrics=metrics, on_ready=lambda url: print(said, url, file=sys.stderr, flush=True))
    return 0


def _check_address(settings: ServerSettings) -> None:
    try:
        settings.check_bind()
        socket.create_server((settings.host, settings.port), family=settings.family).close()
    except InvalidArgumentError as error:
        hint = "--api-key-file FILE or --api-key KEY, or --allow-without-keys for everybody"
        raise InvalidArgumentError(f"--{error} ({hint})") from None
    except OSError as error:
        told = "is in use; --port takes another one" if error.errno == errno.EADDRINUSE else f"can't be had: {error.strerror}"
        raise InvalidArgumentError(f"--port: {settings.port} on {settings.host} {told}") from None


def _close(model: ServedModel) -> None:
    with contextlib.suppress(NotInstalledError):  # a server closes its models itself, if it came to serve them
        model.close()


def settings_of(args: argparse.Namespace) -> ServerSettings:
    """Raises InvalidArgumentError."""
    from hf_cb.server.settings import ServerSettings, keys_of

    keys = [*args.api_key, *keys_of(os.environ.get(_KEYS, ""))]
    if args.api_key_file:
        with open(args.api_key_file, encoding="utf-8", errors="replace") as file:  # what is no ASCII is refused as a key
            keys += filter(None, (line.strip() for line in file))
        if not keys:
            raise InvalidArgumentError(f"api_key_file: {args.api_key_file} has no key in it")
    return ServerSettings(api_keys=tuple(keys), allow_without_keys=args.allow_without_keys, **_given(args, SERVER))


def _given(args: argparse.Namespace, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name in fields if (value := getattr(args, name)) is not None}


def _named(models: list[str]) -> list[tuple[str, str]]:
    """(name, id or folder) each. Raises InvalidArgumentError for a name that comes twice."""
    named: list[tuple[str, str]] = []
    for text in models:
        name, equals, source = text.partition("=")
        if not equals:
            name, source = os.path.basename(os.path.normpath(text)), text
        if not name or not source:
            raise InvalidArgumentError(f"MODEL: takes an {MODEL}, or NAME=MODEL; got {text!r}")
        if name in dict(named):
            raise InvalidArgumentError(f"MODEL: two have the name {name!r}; give them others: NAME={source}")
        named.append((name, source))
    return named


def _observe(model: ServedModel, args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    if args.json_logs:
        from hf_cb.metrics.logs import RequestLog

        model.engine.watch(RequestLog(model.name))
    if args.trace:
        from hf_cb.metrics.spans import RequestTracer

        tracer = RequestTracer(model.name)
        model.engine.watch(tracer)
        stack.callback(tracer.close)
