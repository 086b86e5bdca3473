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
from integrations.policy_gradient import advantages, begins_with_s, train

pytestmark = pytest.mark.timeout(60)


def words() -> PreTrainedTokenizerFast:
    """The first half of the tiny vocabulary are words that begin with an S."""
    vocabulary = {f"{'s' if i < models.VOCAB // 2 else 'w'}{i}": i for i in range(models.VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="s0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="s0")


def arguments(**changes: Any) -> argparse.Namespace:
    given = {"steps": 25, "samples": 6, "new_tokens": 6, "layers": 2, "lr": 5e-3, "discount": 0.5, "seed": 1, "quiet": True}
    return argparse.Namespace(**{**given, **changes})


def test_it_learns_and_the_engine_has_the_new_weights() -> None:
    model = models.tiny("llama")
    frozen = model.model.layers[0].self_attn.q_proj.weight.clone()
    steps = train(
        model, words(), ["s5 w80 s9", "w100", "w70 w71 s2 s3 s4"], lambda piece: float(piece.startswith("s")), arguments()
    )
    assert sum(step.reward for step in steps[-5:]) / 5 > sum(step.reward for step in steps[:5]) / 5 + 0.3
    for step in steps:
        assert step.difference < 1e-4
        assert step.moved > 100 * step.difference  # with the old weights this is what the difference would be
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, frozen)


def group(*rewards: tuple[float, ...]) -> list[policy_gradient.Sample]:
    return [policy_gradient.Sample((1,), (2, 3), (0.0, 0.0), one, "") for one in rewards]


def test_the_baseline_is_a_prompts_other_samples_at_the_same_place() -> None:
    values = advantages([group((0.0, 1.0), (0.0, 0.0)), group((1.0, 0.0), (1.0, 0.0))], discount=0.5)
    assert (values[0] > 0).all()
    assert values[0, 1] == 2 * values[0, 0]  # the reward itself, and its share in what came before
    assert torch.equal(values[1], -values[0])
    assert not values[2:].any()


@pytest.mark.parametrize(("piece", "reward"), [(" six", 1.0), (" Swan", 1.0), ("s", 0.0), (" no", 0.0), ("", 0.0)])
def test_the_reward(piece: str, reward: float) -> None:
    assert begins_with_s(piece) == reward


def test_the_program(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, picture = tmp_path / "model", tmp_path / "out" / "curve.png"
    models.tiny("llama").save_pretrained(folder)
    words().save_pretrained(folder)
    policy_gradient.main(["--model", str(folder), "--steps", "2", "--layers", "1", "--picture", str(picture), "--quiet"])
    assert "update 2: reward" in capsys.readouterr().out
    assert matplotlib.image.imread(picture).shape[1] > 800
