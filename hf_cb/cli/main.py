"""The command `hf-cb`: its commands, and what becomes of their errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import hf_cb
from hf_cb.cli import bench, doctor, run, serve, top
from hf_cb.errors import HFCBError

_COMMANDS = (run, serve, bench, top, doctor)
_OPTIONAL = ("rich", "prometheus_client", "opentelemetry", "fastapi", "uvicorn")
_EPILOG = """\
examples:
  hf-cb run ~/models/SmolLM2-135M-Instruct               chat in this terminal
  hf-cb serve chat=~/models/SmolLM2-135M-Instruct        OpenAI's API on http://127.0.0.1:8000
  hf-cb top                                              watch that server live
  hf-cb bench ~/models/SmolLM2-135M-Instruct             how fast is it here, and how much faster than plain generate()?
  hf-cb doctor                                           does it work on this machine, and with which attention?

hf-cb COMMAND --help has examples of each. A model is an id on the Hugging Face Hub or a folder.
Exit status: 0 if all is well, 1 if something failed, 2 for a wrong command line, 130 after Ctrl-C.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status; what a user can mend is one line on stderr."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has enough; what is left must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OPTIONAL:
            raise
        extra = "tracing" if package == "opentelemetry" else "server" if args.command == "serve" else "cli"
        return _fail(f"{args.command} needs {package}: in the checkout of hf_cb, pip install '.[{extra}]'")
    except (HFCBError, OSError) as error:
        return _fail(str(error))
    return status


def _fail(message: str) -> int:
    print(f"hf-cb: {' '.join(message.split())}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-cb",
        description="Continuous batching for Hugging Face models.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hf-cb {hf_cb.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser
