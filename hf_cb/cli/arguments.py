"""Arguments that several commands take, and the model that they name."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_cb.config import CBConfig
from hf_cb.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from hf_cb.server.models import ServedModel

MODEL = "id on the Hugging Face Hub, or a folder"
API_KEY = "HF_CB_API_KEY"
"""The environment variable with the key that clients send, where no option gives one."""

_DTYPES = ("auto", "float32", "bfloat16", "float16")

Commands = Any  # argparse names the class of its subparsers, but not in public


def add_command(commands: Commands, name: str, help: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser for the command `name`, whose help ends with examples."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a model is loaded."""
    add_device(parser)
    parser.add_argument("--dtype", choices=_DTYPES, default="auto", help="of the weights (default: auto, the checkpoint's own)")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where to compute."""
    parser.add_argument("--device", help="such as cpu, cuda, cuda:1 (default: the GPU if there is one)")


def device_of(args: argparse.Namespace) -> torch.device:
    """The one that was asked for. Raises InvalidArgumentError if it isn't there."""
    import torch

    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device, dtype=torch.uint8)
    except (RuntimeError, AssertionError) as error:
        raise InvalidArgumentError(f"--device: {str(error).splitlines()[0]}") from error
    return device


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """What a client of a server shows."""
    parser.add_argument(
        "--api-key", metavar="KEY", default=os.environ.get(API_KEY), help=f"of the server (default: ${API_KEY})"
    )


def count(text: str) -> int:
    """An integer of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes an integer >= 1; got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A number of seconds above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"takes seconds > 0; got {text!r}")
    return value


@contextlib.contextmanager
def named_as_options() -> Iterator[None]:
    """Errors that begin with a field's name begin with that of its option: kv_cache_memory is --kv-cache-memory."""
    try:
        yield
    except InvalidArgumentError as error:
        name, colon, rest = str(error).partition(":")
        raise InvalidArgumentError(f"--{name.replace('_', '-')}{colon}{rest}") from error


def load(source: str, args: argparse.Namespace, name: str | None = None, **options: Any) -> ServedModel:
    """The model that a command names, with an engine. Raises InvalidArgumentError if there is none that can be loaded."""
    from hf_cb.server.models import load_model

    device = str(device_of(args))
    path = os.path.expanduser(source)
    if path.startswith((os.sep, os.curdir)) and not os.path.isdir(path):
        raise InvalidArgumentError(f"{source}: there is no such folder; a model is an {MODEL}")
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "config.json")):
        raise InvalidArgumentError(f"{source}: there is no config.json in this folder; a model is an {MODEL}")
    with named_as_options():
        CBConfig.make(**options)
    print(f"loading {source}; the first time on a machine, the attention kernel is compiled too", file=sys.stderr)
    try:
        return load_model(path, name, device=device, dtype=args.dtype, **options)
    except InvalidArgumentError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # from_pretrained's, of many lines
        first = str(error).strip().partition("\n")[0]
        raise InvalidArgumentError(f"{source}: can't be loaded as a model ({first}); it takes an {MODEL}") from error
