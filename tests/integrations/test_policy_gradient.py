"""The training example on a tiny model: it learns, and each update reaches the engine."""

from __future__ import annotations

import argparse
from typing import Any

import matplotlib.image
import models
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from integrations import policy_gradient
from integrations.policy_gradient import advantages, share_of_s, train

pytestmark = pytest.mark.timeout(60)


def words() -> PreTrainedTokenizerFast:
    """The first half of the tiny vocabulary are words that begin with an S."""
    vocabulary = {f"{'s' if i < models.VOCAB // 2 else 'w'}{i}": i for i in range(models.VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="s0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="s0")


def arguments(**changes: Any) -> argparse.Namespace:
    given = {"steps": 25, "samples": 6, "new_tokens": 6, "layers": 2, "lr": 5e-3, "seed": 1, "quiet": True}
    return argparse.Namespace(**{**given, **changes})


def test_it_learns_and_the_engine_has_the_new_weights() -> None:
    model = models.tiny("llama")
    frozen = model.model.layers[0].self_attn.q_proj.weight.clone()
    steps = train(model, words(), ["s5 w80 s9", "w100", "w70 w71 s2 s3 s4"], share_of_s, arguments())
    assert sum(step.reward for step in steps[-5:]) / 5 > sum(step.reward for step in steps[:5]) / 5 + 0.3
    for step in steps:
        assert step.difference < 1e-4
        assert step.moved > 100 * step.difference  # with the old weights this is what the difference would be
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, frozen)


def test_the_baseline_is_a_prompts_other_samples() -> None:
    def group(*rewards: float) -> list[policy_gradient.Sample]:
        return [policy_gradient.Sample((1,), (2,), (0.0,), "", reward) for reward in rewards]

    values = advantages([group(1.0, 0.0), group(0.5, 0.5)])
    assert values[:2].sum() == 0
    assert values[0] > 0
    assert values[2:].tolist() == [0, 0]


@pytest.mark.parametrize(("text", "share"), [("Six silver swans", 1.0), ('"Sail on', 0.5), ("no", 0.0), ("", 0.0)])
def test_the_reward(text: str, share: float) -> None:
    assert share_of_s(text) == share


def test_the_program(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, picture = tmp_path / "model", tmp_path / "out" / "curve.png"
    models.tiny("llama").save_pretrained(folder)
    words().save_pretrained(folder)
    policy_gradient.main(["--model", str(folder), "--steps", "2", "--layers", "1", "--picture", str(picture), "--quiet"])
    assert "update 2: reward" in capsys.readouterr().out
    assert matplotlib.image.imread(picture).shape[1] > 800
