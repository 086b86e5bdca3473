"""Plain generate and the engine side by side, on two models with the same weights."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import models
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

import hf_cb

PAD = 0


def prompts(*lengths: int) -> list[torch.Tensor]:
    """One prompt [n] per length: always the same, none with the pad id, from which generate would infer a mask."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, models.VOCAB, (length,), generator=generator) for length in lengths]


NEW = 8
PROMPT = prompts(6)[0][None]


def plain(model: PreTrainedModel, prompt: torch.Tensor = PROMPT, **options: Any) -> torch.Tensor:
    """What the model as it is now generates by itself, whatever is installed on it."""
    return type(model).generate(model, prompt, **{"max_new_tokens": NEW, **options})


def served(model: PreTrainedModel, prompt: torch.Tensor = PROMPT, **options: Any) -> torch.Tensor:
    """What its `generate` gives."""
    return model.generate(prompt, **{"max_new_tokens": NEW, **options})


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """As after `torch.manual_seed(seed)`, for the block alone."""
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def left_padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, both [B, longest], as a tokenizer makes them."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), PAD)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :] = row
        mask[i, longest - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word for every id of the tiny models. One is what transformers looks for before it takes stop strings."""
    vocabulary = {f"w{i}": i for i in range(models.VOCAB) if i != 2} | {"abcdef": 2}
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")


class Recorder(BaseStreamer):
    """Notes what a streamer is given."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append((value.dtype, value.device.type, value.tolist()))

    def end(self) -> None:
        self.events.append("end")


@dataclass(frozen=True)
class Duo:
    """`plain` is untouched, `served` has the engine behind its generate."""

    plain: PreTrainedModel
    served: PreTrainedModel
    engine: hf_cb.Engine

    def same(self, *args: Any, native: str | None = None, seed: int | None = None, **kwargs: Any) -> torch.Tensor:
        """The sequences that both give, after comparing them.

        The engine must have served the call, or run it natively for a reason that contains `native`. A seed is given to the
        served call; plain generate runs after `torch.manual_seed`.
        """
        with seeded(seed):
            want = self.plain.generate(*args, **kwargs)
        with self.native_calls() as reasons:
            got = self.served.generate(*args, **kwargs, **({} if seed is None else {"seed": seed}))
        if native is None:
            assert not reasons
        else:
            assert len(reasons) == 1
            assert native in reasons[0]
        assert type(got) is type(want)
        if isinstance(want, (GenerateDecoderOnlyOutput, GenerateBeamDecoderOnlyOutput)):
            _compare_outputs(got, want, everything=native is not None)
            return want.sequences
        _compare(got, want)
        return want

    def same_error(self, *args: Any, **kwargs: Any) -> tuple[type[Exception], str]:
        """The type and the text of what both raise, after comparing them."""
        errors: list[tuple[type[Exception], str]] = []
        for model in (self.plain, self.served):
            try:
                model.generate(*args, **kwargs)
            except Exception as error:
                errors.append((type(error), str(error)))
        assert len(errors) == 2
        assert errors[0] == errors[1]
        return errors[0]

    @torch.no_grad()
    def both(self, change: Callable[[Any], object]) -> None:
        """The same change to both models."""
        change(self.plain), change(self.served)

    @contextlib.contextmanager
    def native_calls(self) -> Iterator[list[str]]:
        """The reasons of the native calls made inside, once it is left."""
        before, reasons = Counter(self.engine.stats().native_calls), []
        yield reasons
        reasons.extend((Counter(self.engine.stats().native_calls) - before).elements())


@contextlib.contextmanager
def duo(
    name: str = "llama", options: dict[str, Any] | None = None, change: Callable[[Any], object] | None = None, **overrides: Any
) -> Iterator[Duo]:
    """Both models of architecture `name`, after `change`; `options` are the engine's, `overrides` the model's."""
    plain, served = models.tiny(name, **overrides), models.tiny(name, **overrides)
    if change is not None:
        with torch.no_grad():
            change(plain), change(served)
    with hf_cb.continuous_batching(served, **(options or {})) as engine:
        yield Duo(plain, served, engine)


def _compare_outputs(got: Any, want: Any, everything: bool) -> None:
    for name in [field.name for field in fields(want) if everything] or ["sequences"]:
        value = getattr(want, name)
        if isinstance(value, (torch.Tensor, tuple)):
            _compare(getattr(got, name), value)


def _compare(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, tuple):
        for a, b in zip(got, want, strict=True):
            _compare(a, b)
    else:
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
        assert torch.equal(got, want)
